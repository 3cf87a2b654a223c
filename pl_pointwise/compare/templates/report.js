"use strict";
// A click on a column's name sorts the table by it: upwards, at the next click downwards.
for (const button of document.querySelectorAll("th button")) {
  button.addEventListener("click", () => {
    const head = button.parentElement, body = head.closest("table").tBodies[0];
    const column = [...head.parentElement.children].indexOf(head);
    const sign = head.getAttribute("aria-sort") === "ascending" ? -1 : 1;
    const key = (row) => row.cells[column].textContent.trim();
    // "0.40 ± 0.02 · 0.38 ± 0.01" goes by its first number; "(1.2 ± 0.3)e-07" has its exponent.
    const number = (text) => {
      const found = /^\(?([-+]?[\d.]+(?:e[-+]?\d+)?)/.exec(text);
      const exponent = /^\([^)]*\)(e[-+]?\d+)/.exec(text);
      return found ? Number(found[1] + (exponent ? exponent[1] : "")) : NaN;
    };
    const rows = [...body.rows].map((row) => ({row, text: key(row), value: number(key(row))}));
    rows.sort((a, b) => {
      const gone = Number(Number.isNaN(a.value)) - Number(Number.isNaN(b.value));
      if (gone) return gone; // What is no number stays below.
      return sign * (Number.isNaN(a.value) ? a.text.localeCompare(b.text) : a.value - b.value);
    });
    body.append(...rows.map((entry) => entry.row));
    for (const other of head.parentElement.children) other.removeAttribute("aria-sort");
    head.setAttribute("aria-sort", sign > 0 ? "ascending" : "descending");
  });
}

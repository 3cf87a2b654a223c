/* Guides before the reference, and both before what developers read: Sphinx ranks by titles and
   names alone, so that attributes such as `violated` would stand above the page that explains it. */
var Scorer = {
  score: ([docname, title, anchor, descr, score, filename, kind]) => {
    if (/^(docs\/appendix\/|benchmarks\/|CHANGELOG|CONTRIBUTING|RELEASING)/.test(docname))
      return score - 20;
    if (!docname.startsWith("docs/api/")) return score + 10;
    return score - (kind === "object" && title.split(".").length > 2 ? 10 : 0);
  },
  objNameMatch: 11,
  objPartialMatch: 6,
  objPrio: { 0: 5, 1: 5, 2: -5 },
  objPrioDefault: 0,
  title: 15,
  partialTitle: 7,
  term: 5,
  partialTerm: 2,
};

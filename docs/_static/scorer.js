/* Guides before the reference, and both before what developers read. Sphinx counts no words: pages
   with a word in a title stand first, then all others by name. Of these the questions come first. */
var Scorer = {
  score: ([docname, title, anchor, descr, score, filename, kind]) => {
    if (/^(docs\/appendix\/|benchmarks\/|CHANGELOG|CONTRIBUTING|RELEASING)/.test(docname))
      return score - 20;
    if (docname === "docs/faq") return score + 15;
    if (/^docs\/(devices|metrics|policy|settings|tolerance)$/.test(docname)) return score + 12;
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

// Asks the search of the built site the questions of docs/search_questions.txt, or of another file:
//
//   make docs && node docs/search.js build/site [docs/search_questions_new.txt]
//
// It runs the site's own scripts, so that what it finds is what a reader finds. Prints every
// question whose page is not among the first three hits; ends with status 1 where fewer than 38
// of 40, or the same share of another number, have theirs.

const fs = require("fs");
const path = require("path");
const vm = require("vm");

const site = path.resolve(process.argv[2] || "build/site");
const FIRST = 3;
const WANTED = 38 / 40;

// What the scripts expect of a browser: enough to be loaded, and nothing of it is looked at.
const nothing = () => undefined;
const element = { addEventListener: nothing, removeChild: nothing, appendChild: nothing };
const browser = vm.createContext({
  document: { ...element, getElementById: () => element, querySelector: () => null },
  location: { search: "" },
  DOCUMENTATION_OPTIONS: {},
  SPHINX_HIGHLIGHT_ENABLED: false,
  _: (text) => text,
  _ready: nothing,
  console,
});
browser.window = browser;
for (const file of ["_static/language_data.js", "_static/searchtools.js", "searchindex.js"])
  vm.runInContext(fs.readFileSync(path.join(site, file), "utf-8"), browser, file);

/** Pages in the order in which the site lists them, each once; the last of a list is the best. */
function pagesFor(query) {
  browser.query = query;
  const results = vm.runInContext("Search._performSearch(...Search._parseQuery(query))", browser);
  return [...new Set(results.reverse().map((result) => result[0]))];
}

const file = process.argv[3] || path.join(__dirname, "search_questions.txt");
const lines = fs.readFileSync(file, "utf-8").split("\n");
const questions = lines
  .filter((line) => line.trim() && !line.startsWith("#"))
  .map((line) => line.split("|").map((part) => part.trim()));
let found = 0;
for (const [query, ...pages] of questions) {
  const hits = pagesFor(query);
  if (hits.slice(0, FIRST).some((hit) => pages.includes(hit))) found += 1;
  else console.log(`${query}: not ${pages.join(", ")} but ${hits.slice(0, 5).join(", ") || "nothing"}`);
}
console.log(`${found} of ${questions.length} questions have their page among the first ${FIRST} hits`);
process.exitCode = found >= WANTED * questions.length ? 0 : 1;

// Tables of generations.
function score(value) {
  const tone = typeof value !== "number" ? "" : value > 0.5 ? " hi" : " lo";
  return el("span", { class: "score" + tone, text: typeof value === "number" ? fmt(value) : "–" });
}
function cell(row, name) {
  const value = row[name], about = { "data-name": name };
  if (name === "score") return el("td", { ...about, class: "num" }, score(value));
  if (typeof value === "number") return el("td", { ...about, class: "num", text: fmt(value) });
  if (name === "images") {
    const picture = (n) => (DATA.pictures[n] ? el("img", { src: DATA.pictures[n], alt: n, title: n }) : n);
    return el("td", { ...about, class: "images" }, ...(value || []).map(picture));
  }
  if (name === "film") return el("td", about, value ? el("img", { src: value, alt: "episode" }) : "");
  const text = value === null || value === undefined ? "" : String(value);
  return el("td", { ...about, class: "text" }, el("div", { class: "cut", text }));
}
// Buttons of which one is pressed; `chosen` keeps the choice when the page is drawn again.
function choice(id, values, label, show) {
  const bar = el("div", { class: "bar" }, label ? `${label} ` : "");
  const press = (value) => {
    chosen[id] = value;
    for (const b of bar.querySelectorAll("button")) b.setAttribute("aria-pressed", String(b.textContent === String(value)));
    show(value);
  };
  for (const value of values) bar.append(el("button", { "aria-pressed": "false", text: value, onclick: () => press(value) }));
  return { bar, press: () => press(values.includes(chosen[id]) ? chosen[id] : values[values.length - 1]) };
}
const chosen = {};

function samples() {
  const rows = DATA.samples;
  if (!rows.length) return;
  const body = el("tbody"), columns = DATA.sampleColumns;
  const steps = choice("samples", [...new Set(rows.map((r) => r.step))].sort((a, b) => a - b), "step", (step) =>
    body.replaceChildren(...rows.filter((r) => r.step === step).map((r) => el("tr", {}, ...columns.map((c) => cell(r, c))))));
  const numeric = (c) => c === "score" || rows.some((r) => typeof r[c] === "number");
  const head = el("tr", {}, ...columns.map((c) => el("th", { class: numeric(c) ? "num" : null, text: c })));
  section("samples", "Samples", "Samples", DATA.samplesNote, steps.bar,
    el("div", { class: "table rows" }, el("table", {}, el("thead", {}, head), body)));
  steps.press();
}

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
    bar.querySelectorAll("button").forEach((b, i) => b.setAttribute("aria-pressed", String(values[i] === value)));
    show(value);
  };
  for (const value of values) bar.append(el("button", { "aria-pressed": "false", text: value, onclick: () => press(value) }));
  return { bar, press: () => press(values.includes(chosen[id]) ? chosen[id] : values[values.length - 1]) };
}
const chosen = {};

function samples() {
  const all = DATA.samples;
  if (!all.length) return;
  const body = el("tbody"), columns = DATA.sampleColumns, place = el("div");
  function showRun(run) {
    const rows = all.filter((r) => r.run === run);
    const steps = choice("samples", [...new Set(rows.map((r) => r.step))].sort((a, b) => a - b), "step", (step) =>
      body.replaceChildren(...rows.filter((r) => r.step === step).map((r) => el("tr", {}, ...columns.map((c) => cell(r, c))))));
    place.replaceChildren(steps.bar);
    steps.press();
  }
  const runs = [...new Set(all.map((r) => r.run))], bar = choice("sample run", runs, "run", showRun);
  const numeric = (c) => c === "score" || all.some((r) => typeof r[c] === "number");
  const head = el("tr", {}, ...columns.map((c) => el("th", { class: numeric(c) ? "num" : null, text: c })));
  section("samples", "Held-out samples", "Samples", DATA.samplesNote, runs.length > 1 ? bar.bar : null, place,
    el("div", { class: "table rows" }, el("table", {}, el("thead", {}, head), body)));
  bar.press();
}

// Groups of training samples: what each was rewarded with, and its tokens in the colours of what is known of them.
const TOKEN_VALUES = { advantage: "advantages", ratio: "ratios", age: "ages" };
function training() {
  if (!DATA.training.length) return;
  const place = el("div"), body = el("div");
  let rows = [];
  function show() {
    const name = chosen["token colour"] || "advantage", values = TOKEN_VALUES[name];
    const shown = rows.filter((r) => r.step === chosen["training step"]);
    const size = (v) => Math.abs(name === "ratio" ? Math.log(v) : v);
    const all = shown.flatMap((r) => r[values] || []).filter((v) => v !== null && Number.isFinite(size(v)));
    const most = Math.max(...all.map(size), 1e-9), groups = Map.groupBy ? Map.groupBy(shown, (r) => r.group) : grouped(shown);
    const tint = (v) => {
      if (v === null || v === undefined) return "transparent";
      const tone = name === "age" ? "var(--accent)" : (name === "ratio" ? v > 1 : v > 0) ? "var(--good)" : "var(--bad)";
      return `color-mix(in srgb, ${tone} ${Math.round(55 * Math.min(1, size(v) / most))}%, transparent)`;
    };
    const range = all.length ? `${fmt(Math.min(...all))} to ${fmt(Math.max(...all))}` : "not known";
    const legend = el("p", { class: "hint", text: `${name} of a token: ${range}${name === "age" ? " steps" : ""}; without colour: not trained on, or none` });
    body.replaceChildren(legend, ...[...groups.values()].map((group) => groupCard(group, values, tint)));
  }
  function showRun(run) {
    rows = DATA.training.find((r) => r.run === run).rows;
    const steps = choice("training step", [...new Set(rows.map((r) => r.step))], "step", show);
    const known = Object.keys(TOKEN_VALUES).filter((name) => rows.some((r) => r[TOKEN_VALUES[name]]));
    const colours = choice("token colour", known, "colour", show);
    if (!known.includes(chosen["token colour"])) chosen["token colour"] = known[0];
    place.replaceChildren(steps.bar, colours.bar);
    steps.press();
    colours.press();
  }
  const bar = choice("training run", DATA.training.map((r) => r.run), "run", showRun);
  section("groups", "Groups of training samples", "Groups", "", DATA.training.length > 1 ? bar.bar : null, place, body);
  bar.press();
}
function grouped(rows) {
  const groups = new Map();
  for (const row of rows) groups.set(row.group, [...(groups.get(row.group) || []), row]);
  return groups;
}
function groupCard(group, values, tint) {
  const first = group[0], scores = group.map((r) => r.score).filter((v) => typeof v === "number");
  const mean = scores.reduce((a, v) => a + v, 0) / (scores.length || 1), flat = new Set(scores).size < 2;
  const about = scores.length ? `mean score ${fmt(mean)}${flat && group.length > 1 ? ", no signal: all scores are equal" : ""}` : "";
  const answer = first.answer === undefined || first.answer === null ? null : el("p", { class: "hint", text: `answer: ${first.answer}` });
  const rows = group.map((row) => el("div", { class: "sample" },
    el("div", { class: "facts" }, score(row.score), el("span", {}, "advantage ", el("b", { text: fmt(row.advantage) })),
      el("span", { text: `${row.tokens} tokens` }), row.finish_reason ? el("span", { text: row.finish_reason }) : null),
    el("div", { class: "tokens" }, ...row.pieces.map((piece, i) => token(row, piece, i, values, tint)),
      row.pieces.length < row.tokens ? el("span", { class: "more", text: ` … ${row.tokens - row.pieces.length} more tokens` }) : null),
    row.output ? el("pre", { class: "hint", text: row.output }) : null));
  return el("div", { class: "card group" }, el("div", { class: "head" }, el("h3", { text: `Group ${first.group}` }), el("span", { class: "hint", text: about })),
    el("div", { class: "prompt cut", text: first.prompt }), answer, ...rows);
}
function token(row, piece, i, values, tint) {
  const told = Object.entries(TOKEN_VALUES).filter(([, list]) => row[list]).map(([name, list]) => `${name} ${fmt(row[list][i])}`);
  const value = row[values] ? row[values][i] : null;
  const off = row.advantages && row.advantages[i] === null;
  return el("span", { class: off ? "off" : null, style: `background:${tint(value)}`, title: `${told.join(", ")}${off ? ", not trained on" : ""}`,
    text: piece.replaceAll("\n", "⏎\n") || "∅" });
}

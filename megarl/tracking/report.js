// The page. Everything on it comes from one JSON object.
let DATA = JSON.parse(document.getElementById("data").textContent);

function kind() {
  const text = DATA.runs.length > 1 ? `comparison of ${DATA.runs.length} runs` : "megarl run";
  return DATA.live ? `${text} · live, as of ${DATA.live.at}` : text;
}
function header() {
  const run = DATA.runs[0], compare = DATA.runs.length > 1;
  const facts = el("p", { class: "facts" });
  for (const [name, value] of DATA.facts) facts.append(el("span", {}, `${name} `, el("b", { text: value })));
  const tiles = el("div", { class: "tiles" }, ...DATA.tiles.map((t) => {
    const name = el("div", { class: "name", text: t.label + (compare && t.unit ? ` [${t.unit}]` : "") });
    if (compare) return el("div", { class: "tile" }, name, ...t.runs.map((r, i) => el("div", { title: r.note }, key("", color(i), fmt(r.value)))));
    const value = el("div", { class: "value" }, fmt(t.runs[0].value), t.unit ? el("small", { text: t.unit }) : null);
    return el("div", { class: "tile" }, name, value, el("div", { class: "note", text: t.runs[0].note }), sparkline(t.y));
  }));
  const top = document.getElementById("top");
  top.append(el("div", { class: "eyebrow", id: "kind", text: kind() }),
    el("div", { class: "titleline" }, el("h1", { text: run.name }), el("span", { class: `pill ${run.status}`, text: run.status })), facts);
  if (compare) top.append(el("div", { class: "legend" }, ...DATA.runs.map((r, i) => key(r.name, color(i)))));
  top.append(tiles);
}

function section(id, title, short, note, ...children) {
  document.querySelector("nav .in .tools").before(el("a", { href: `#${id}`, text: short, title }));
  const node = el("section", { id }, el("h2", {}, title, note ? el("small", { text: note }) : null), ...children);
  document.getElementById("main").append(node);
  return node;
}
function charts() {
  for (const group of DATA.groups) {
    const hero = el("div", { class: "grid hero" }), grid = el("div", { class: "grid" });
    for (const spec of group.charts) {
      for (const s of spec.lines || []) s.color = color(s.tint);
      const card = spec.kind === "waits" ? waitsCard(spec) : spec.kind === "stack" ? stackCard(spec) : lineCard(spec);
      (spec.hero ? hero : grid).append(card);
    }
    const constants = group.constants.length ? el("p", { class: "constants" }, "constant: ",
      ...group.constants.map(([name, value]) => el("span", {}, `${name} `, el("b", { text: value })))) : null;
    const grids = [hero, grid].filter((g) => g.children.length);
    if (!group.folded) { section(group.id, group.title, group.short, group.note, ...grids, constants); continue; }
    const count = `${group.charts.length} charts` + (group.constants.length ? `, ${group.constants.length} constants` : "");
    section(group.id, group.title, group.short, "", fold(group.id, count, group.note, ...grids, constants));
  }
}
// A part that is closed at first; what was opened is open when the page is drawn again.
function fold(id, title, note, ...children) {
  const node = el("details", { ontoggle: () => { chosen[`fold ${id}`] = node.open; } },
    el("summary", {}, title, note ? el("small", { text: note }) : null), el("div", { class: "inside" }, ...children));
  node.open = Boolean(chosen[`fold ${id}`]);
  return node;
}

function differences() {
  if (!DATA.differences.length) return;
  const head = el("tr", {}, el("th", { text: "key" }), ...DATA.runs.map((r) => el("th", { text: r.name })));
  const body = DATA.differences.map(([name, values]) => el("tr", {}, el("td", { "data-name": "key", text: name }),
    ...values.map((value, i) => el("td", { "data-name": DATA.runs[i].name, class: "text", text: value }))));
  section("differences", "What differs in the configuration", "Differences", `${DATA.differences.length} keys`,
    el("div", { class: "table rows" }, el("table", {}, el("thead", {}, head), el("tbody", {}, ...body))));
}

function details() {
  if (DATA.graph) section("graph", "Task graph", "Graph", "", el("div", { class: "graph" }, el("img", { src: DATA.graph, alt: "task graph" })));
  if (DATA.profiles.length) {
    const links = DATA.profiles.map((file) => el("li", {}, el("a", { href: file, download: "", text: file })));
    section("profiles", "Profiles", "Profiles", "open a file in ui.perfetto.dev", el("ul", {}, ...links));
  }
  const pre = el("pre");
  for (const line of DATA.config.split("\n")) {
    const match = /^(\s*(?:- )?)([\w./-]+)(:.*)$/.exec(line);
    if (match) pre.append(match[1], el("span", { class: "k", text: match[2] }), `${match[3]}\n`);
    else pre.append(`${line}\n`);
  }
  const machine = el("table", {}, el("tbody", {}, ...DATA.machine.map(([k, v]) => el("tr", {}, el("td", { text: k }), el("td", { class: "text", text: v })))));
  section("setup", "Setup", "Setup", "", fold("config", "Configuration", "resolved, as it ran", pre), fold("machine", "Machine and software", "", machine));
}

function tools() {
  const slider = el("input", { type: "range", min: 0, max: 0.98, step: 0.02, value: state.smooth, "aria-label": "smoothing",
    oninput: (e) => { state.smooth = Number(e.target.value); redrawAll(); } });
  const dark = () => (document.documentElement.dataset.theme || (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light")) === "dark";
  const theme = el("button", { text: "light / dark", onclick: () => { document.documentElement.dataset.theme = dark() ? "light" : "dark"; } });
  const reset = el("button", { id: "reset", text: "all steps", title: "end the zoom", onclick: () => Object.keys(state.zoom).forEach((stage) => zoom(stage, null)) });
  reset.hidden = !Object.keys(state.zoom).length;
  document.getElementById("nav").append(el("div", { class: "in" }, el("div", { class: "tools" }, reset, el("label", {}, "smoothing ", slider), theme)));
}
// The link of the section that is at the top of the window is marked.
function follow() {
  const links = [...document.querySelectorAll("nav a")];
  const at = () => {
    const passed = links.filter((a) => document.querySelector(a.hash).getBoundingClientRect().top < 120);
    links.forEach((a) => a.classList.toggle("here", a === passed[passed.length - 1]));
  };
  document.onscroll = at;
  at();
}

function build() {
  for (const id of ["top", "nav", "main"]) document.getElementById(id).replaceChildren();
  state.plots = [];
  header();
  tools();
  differences();
  charts();
  samples();
  training();
  details();
  follow();
}
// A served page looks for news of its runs, and draws itself again where it stands.
async function look() {
  const place = document.getElementById("kind");
  try {
    const answer = await fetch(`data?tag=${encodeURIComponent(DATA.live.tag)}`);
    if (!answer.ok) throw new Error(await answer.text());
    place.textContent = kind();
    if (answer.status === 200 && !document.querySelector("input:active, .area")) {
      const at = scrollY;
      DATA = await answer.json();
      build();
      scrollTo({ top: at, behavior: "instant" });
    }
  } catch (error) {
    place.textContent = `no news since ${DATA.live.at}: ${error.message}`;
  }
  setTimeout(look, 1000 * DATA.live.period_s);
}
build();
if (DATA.live) setTimeout(look, 1000 * DATA.live.period_s);

"use strict";
const $ = (id) => document.getElementById(id);
const rated = new Map(); // id -> {title, value}
let model = null;
let asked = 0; // the newest request for a list; answers to older ones are dropped

function say(problem) {
  $("error").textContent = problem || "";
  $("error").hidden = !problem;
}

async function call(path, body) {
  const headers = { "Content-Type": "application/json" };
  const token = sessionStorage.getItem("token");
  if (token) headers.Authorization = `Bearer ${token}`;
  const options = body ? { method: "POST", headers, body: JSON.stringify(body) } : { headers };
  let answer;
  try {
    answer = await fetch(path, options);
  } catch {
    throw new Error("The service does not answer. Is it still running?");
  }
  const content = await answer.json().catch(() => ({}));
  if (answer.status === 401) $("login").hidden = false;
  if (!answer.ok) throw new Error(content.detail || `The service answered ${answer.status}.`);
  return content;
}

function element(name, text, attributes = {}) {
  const made = document.createElement(name);
  made.textContent = text;
  Object.assign(made, attributes);
  return made;
}

function debounce(work, milliseconds) {
  let waiting;
  return () => {
    clearTimeout(waiting);
    waiting = setTimeout(() => guard(work), milliseconds);
  };
}

async function guard(work) {
  try {
    await work();
  } catch (problem) {
    say(problem.message);
  }
}

async function start() {
  model = await call("model");
  say("");
  $("login").hidden = true;
  $("about").textContent =
    `${model.rows.toLocaleString()} × ${model.columns.toLocaleString()} ${model.names[1]}, ` +
    (model.rates ? `values from ${model.low} to ${model.high}` : "chosen or not");
  $("version").textContent = model.version;
  await search();
}

async function search() {
  const query = $("query").value.trim();
  const { found } = await call(`search?q=${encodeURIComponent(query)}`);
  say("");
  $("found").replaceChildren(
    ...found.map(({ id, title }) => {
      const item = document.createElement("li");
      item.append(element("button", title, { type: "button", onclick: () => add(id, title) }));
      return item;
    }),
  );
  if (query && !found.length) $("found").append(element("li", "Nothing with these words."));
}

function add(id, title) {
  if (!rated.has(id)) rated.set(id, { title, value: model.rates ? model.high : 1 });
  showRated();
  guard(recommend);
}

const later = debounce(recommend, 150);

function showRated() {
  $("hint").hidden = rated.size > 0;
  $("rated").replaceChildren(
    ...[...rated].map(([id, one]) => {
      const item = document.createElement("li");
      const value = element("output", model.rates ? String(one.value) : "");
      const remove = element("button", "remove", { type: "button" });
      remove.setAttribute("aria-label", `Remove ${one.title}`);
      remove.onclick = () => {
        rated.delete(id);
        showRated();
        guard(recommend);
      };
      item.append(element("span", one.title), value, remove);
      if (model.rates) {
        const slider = element("input", "", { type: "range", min: model.low, max: model.high });
        slider.step = (model.high - model.low) / 20 > 0.25 ? "any" : "0.5";
        slider.value = one.value;
        slider.setAttribute("aria-label", `Your value for ${one.title}`);
        slider.oninput = () => {
          one.value = Number(slider.value);
          value.textContent = String(Math.round(100 * one.value) / 100);
          later();
        };
        item.append(slider);
      }
      return item;
    }),
  );
}

const ratings = () => [...rated].map(([column, { value }]) => ({ column, value }));

async function recommend() {
  const own = ++asked;
  if (!rated.size) {
    $("list").replaceChildren();
    $("scale").hidden = true;
    return;
  }
  const by = document.querySelector("input[name=by]:checked").value;
  const answer = await call("recommend_new", { ratings: ratings(), k: 10, by });
  if (own !== asked) return;
  say("");
  $("version").textContent = answer.version;
  $("list").replaceChildren(...answer.rows.map(place));
  $("scale").hidden = !answer.rows.some((row) => row.low !== undefined && row.low !== null);
}

function place(row) {
  const item = document.createElement("li");
  const id = row[model.names[1]];
  const why = element("button", "why?", { type: "button" });
  const value = element("span", row.prediction.toFixed(model.rates ? 1 : 2), { className: "value" });
  item.append(element("span", row.title || String(id)), value, why);
  if (row.low !== undefined && row.low !== null) item.append(range(row));
  why.onclick = () => guard(() => explain(item, id, why));
  return item;
}

function range({ low, high, prediction }) {
  const share = (v) => `${(100 * (v - model.low)) / (model.high - model.low || 1)}%`;
  const bar = element("div", "", { className: "range", title: `${low.toFixed(2)} to ${high.toFixed(2)}` });
  const inner = document.createElement("i");
  inner.style.left = share(low);
  inner.style.width = `calc(${share(high)} - ${share(low)})`;
  const mark = document.createElement("b");
  mark.style.left = share(prediction);
  bar.append(inner, mark);
  return bar;
}

async function explain(item, column, button) {
  const shown = item.querySelector(".why");
  if (shown) {
    shown.remove();
    return;
  }
  const answer = await call("explain", { ratings: ratings(), column, k: 3 });
  say("");
  const reasons = answer.rows.map((row) => {
    const change = row.share >= 0 ? `+${row.share.toFixed(2)}` : row.share.toFixed(2);
    return `${row.title || row[model.names[1]]} (${change})`;
  });
  const text = reasons.length ? `Because of ${reasons.join(", ")}` : "Your ratings say nothing about it.";
  item.append(element("p", text, { className: "why" }));
  button.setAttribute("aria-expanded", "true");
}

$("query").addEventListener("input", debounce(search, 150));
$("by").addEventListener("change", () => guard(recommend));
$("login").addEventListener("submit", (event) => {
  event.preventDefault();
  sessionStorage.setItem("token", $("token").value);
  guard(start);
});
guard(start);

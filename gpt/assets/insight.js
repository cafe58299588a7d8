"use strict";
const data = JSON.parse(document.getElementById("data").textContent);
const count = data.tokens.length, depth = data.layers.length - 1, heads = data.heads, width = data.width;
const BITS = 12, NUMBERS = 8, ROWS = 8;  // the most surprise in the colours; columns and rows of the tables
const $ = (id) => document.getElementById(id);
const text = (i) => data.vocabulary[data.tokens[i]];
const state = { token: Math.min(data.given, count - 1), mode: "surprise", layer: depth - 1, head: 0 };

function element(name, properties = {}, ...children) {
  const made = Object.assign(document.createElement(name), properties);
  made.append(...children);
  return made;
}

// --- queries, keys and values, decoded for a layer when it is first looked at ---

const floats = (() => {  // half precision to numbers
  let table = null;
  return (bits) => {
    if (!table) {
      table = new Float32Array(65536);
      for (let i = 0; i < 65536; i++) {
        const exponent = (i >> 10) & 31, fraction = i & 1023;
        const size = exponent ? (exponent === 31 ? Infinity : 2 ** (exponent - 15) * (1 + fraction / 1024)) : fraction * 2 ** -24;
        table[i] = i >> 15 ? -size : size;
      }
    }
    return table[bits];
  };
})();
const layers = new Map();

function part(layer, kind, head, token) {  // kind: 0 query, 1 key, 2 value
  if (!layers.has(layer)) {
    const bytes = Uint8Array.from(atob($(`layer${layer}`).textContent), (c) => c.charCodeAt(0));
    layers.set(layer, new Uint16Array(bytes.buffer));
  }
  const start = ((kind * heads + head) * count + token) * width;
  return Array.from(layers.get(layer).subarray(start, start + width), floats);
}

function attend(layer, head, token) {  // the scores and weights of one query
  const query = part(layer, 0, head, token), scores = [];
  for (let i = 0; i <= token; i++) {
    const key = part(layer, 1, head, i);
    scores.push(query.reduce((sum, q, d) => sum + q * key[d], 0) / Math.sqrt(width));
  }
  const most = Math.max(...scores), powers = scores.map((score) => Math.exp(score - most));
  const sum = powers.reduce((a, b) => a + b, 0);
  return { scores, weights: powers.map((power) => power / sum) };
}

// --- the text ---

const spans = data.tokens.map((id, i) => {
  const shown = data.vocabulary[id], span = element("span", { className: "token", textContent: shown, id: `token${i}` });
  if (i >= data.given) span.classList.add("new");
  span.setAttribute("role", "option");
  span.addEventListener("click", () => choose({ token: i }));
  span.addEventListener("mouseenter", () => show(i));
  span.addEventListener("mouseleave", () => show(state.token));
  $("text").append(span, "\n".repeat(shown.split("\u23ce").length - 1));
  return span;
});

function show(i) {  // a token that the mouse is over, or the chosen one
  const bits = data.expected[i].bits;
  const surprise = bits === null ? "the first token: nothing was expected" : `probability ${percent(2 ** -bits)}, surprise ${bits.toFixed(2)} bits`;
  $("chosen").textContent = `token ${i + 1} of ${count}: \u201c${text(i)}\u201d, ${surprise}`;
  const weights = state.mode === "attention" ? attend(state.layer, state.head, i).weights : null;
  const most = weights && Math.max(...weights);
  $("text").className = state.mode;
  $("legend-bar").parentElement.className = `legend ${state.mode}`;
  $("legend-low").textContent = weights ? "0%" : "0 bits";
  $("legend-high").textContent = weights ? percent(most) : `${BITS} bits`;
  spans.forEach((span, j) => {
    const share = weights ? (weights[j] ?? 0) / most : Math.min(1, (data.expected[j].bits ?? 0) / BITS);
    span.style.setProperty("--strength", (0.85 * share).toFixed(3));
    span.setAttribute("aria-selected", j === state.token);
  });
  $("text").setAttribute("aria-activedescendant", `token${state.token}`);
}

// --- the panels ---

const percent = (p) => (p >= 0.1 ? `${(100 * p).toFixed(0)}%` : p >= 0.001 ? `${(100 * p).toFixed(1)}%` : "<0.1%");
const bar = (p) => element("span", { className: "bar", style: `width:${(8 * p).toFixed(2)}rem` });
const row = (...cells) => element("tr", {}, ...cells);
const cell = (content, className = "") => element("td", { className }, content);
const name = (content) => element("th", { scope: "row", textContent: content });
const table = (...rows) => element("div", { className: "scroll" }, element("table", {}, ...rows));

function number(value, most) {
  const made = cell(value === null ? "\u2212\u221e" : value.toFixed(2), `number ${value < 0 ? "minus" : "plus"}`);
  made.style.setProperty("--strength", value === null ? 0 : (0.6 * Math.abs(value) / most).toFixed(3));
  return made;
}

function showExpected() {
  const { likeliest } = data.expected[state.token];
  const filtered = likeliest.some((one) => one.length > 2);
  $("expected-how").textContent = likeliest.length === 0 ? "Nothing comes before the first token."
    : filtered ? "The likeliest tokens, the model's own probability, and what temperature and filters left of it; what they cut is struck out. The drawn token is bold."
    : "The likeliest tokens in this place with the model's probability. The token that stands here is bold.";
  $("expected").replaceChildren(table(...likeliest.map(([id, p, left]) => {
    const own = id === data.tokens[state.token] ? "own" : "", cut = left === 0 ? "cut" : "";
    const cells = [cell(data.vocabulary[id], `${own} ${cut}`), cell(percent(p), "number"), cell(bar(p))];
    return row(...cells, ...(filtered ? [cell(left === 0 ? "cut" : percent(left), "number"), cell(bar(left))] : []));
  })));
}

function showLayers() {
  const place = state.token - 1;
  $("layers").replaceChildren(place < 0 ? "Nothing comes before the first token." : table(...data.layers.map((layer, i) => row(
    name(i ? `after block ${i}` : "embedding"),
    ...layer[place].map(([id, p]) => cell(`${data.vocabulary[id]} ${percent(p)}`, id === data.tokens[state.token] ? "own" : "")),
  ))));
}

function showSteps() {
  const { layer, head, token } = state, { scores, weights } = attend(layer, head, token);
  const attended = [...weights.keys()].sort((a, b) => weights[b] - weights[a]).slice(0, ROWS);
  const shown = [...new Set([...attended, token])].sort((a, b) => a - b);
  const later = token + 1 < count ? [token + 1] : [];
  const share = shown.reduce((sum, i) => sum + weights[i], 0);
  $("head-how").textContent = `Head ${head + 1} of layer ${layer + 1} looks from \u201c${text(token)}\u201d, in the order of docs/attention.md. Shown are the tokens that it attends to most, which have ${percent(share)} of the weight${width > NUMBERS ? `, and the first ${NUMBERS} of ${width} numbers of each vector` : ""}.`;
  const vectors = (title, kind, tokens) => {
    const numbers = tokens.map((i) => part(layer, kind, head, i).slice(0, NUMBERS));
    const most = Math.max(...numbers.flat().map(Math.abs));
    return [element("h3", { textContent: title }), table(...tokens.map((i, r) => row(name(`${i + 1} ${text(i)}`), ...numbers[r].map((n) => number(n, most)))))];
  };
  const all = [...shown, ...later], across = (label, values, most) => row(name(label), ...values.map((value) => number(value, most)));
  const largest = Math.max(...shown.map((i) => Math.abs(scores[i])));
  const context = new Float64Array(width);
  weights.forEach((weight, i) => part(layer, 2, head, i).forEach((value, d) => { context[d] += weight * value; }));
  const first = Array.from(context).slice(0, NUMBERS);
  $("steps").replaceChildren(
    ...vectors("1. The query: what this token looks for", 0, [token]),
    ...vectors("2. The keys: what each token offers to be found by", 1, shown),
    element("h3", { textContent: `3. Scores: query times key, divided by the square root of ${width}; later tokens are masked; softmax makes weights` }),
    table(row(name(""), ...all.map((i) => cell(text(i)))),
      across("score", all.map((i) => (i > token ? null : scores[i])), largest),
      across("weight", all.map((i) => weights[i] ?? 0), 1)),
    ...vectors("4. The values: what each token passes on", 2, shown),
    element("h3", { textContent: "5. The context vector: the average of all values with these weights" }),
    table(row(name("context"), ...first.map((n) => number(n, Math.max(...first.map(Math.abs)))))),
  );
}

// --- choosing ---

function radios(group, key, values, label) {
  const buttons = values.map((value, i) => {
    const button = element("button", { type: "button", textContent: label(value) });
    button.setAttribute("role", "radio");
    button.dataset.value = value;
    button.addEventListener("click", () => choose({ [key]: value }));
    button.addEventListener("keydown", (event) => {
      const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
      if (!step) return;
      event.preventDefault();
      const next = (i + step + values.length) % values.length;
      choose({ [key]: values[next] });
      buttons[next].focus();
    });
    return button;
  });
  group.append(...buttons);
  return () => buttons.forEach((button, i) => {
    button.setAttribute("aria-checked", values[i] === state[key]);
    button.tabIndex = values[i] === state[key] ? 0 : -1;
  });
}

const range = (n) => Array.from({ length: n }, (_, i) => i);
const modes = [...document.querySelectorAll("[data-mode]")];
modes.forEach((button) => button.addEventListener("click", () => choose({ mode: button.dataset.mode })));
const checks = [
  radios($("layer-buttons"), "layer", range(depth), (i) => String(i + 1)),
  radios($("head-buttons"), "head", range(heads), (i) => String(i + 1)),
  () => modes.forEach((button) => button.setAttribute("aria-checked", button.dataset.mode === state.mode)),
];

function choose(change) {
  Object.assign(state, change);
  checks.forEach((check) => check());
  show(state.token);
  if ("token" in change) {
    showExpected();
    showLayers();
    const span = spans[state.token], box = $("text");
    if (span.offsetTop < box.scrollTop || span.offsetTop > box.scrollTop + box.clientHeight - 32) box.scrollTop = span.offsetTop - 64;
  }
  showSteps();
}

$("text").addEventListener("keydown", (event) => {
  const step = { ArrowRight: 1, ArrowDown: 10, ArrowLeft: -1, ArrowUp: -10, Home: -count, End: count }[event.key];
  if (!step) return;
  event.preventDefault();
  choose({ token: Math.max(0, Math.min(count - 1, state.token + step)) });
});
$("facts").textContent = Object.entries(data.facts).map(([key, value]) => `${key} ${value}`).join(" \u00b7 ");
choose({ token: state.token });

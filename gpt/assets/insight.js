"use strict";
const data = JSON.parse(document.getElementById("data").textContent);
const count = data.tokens.length, depth = data.layers.length - 1, heads = data.heads, width = data.width;
const seen = count - 1;  // the last token is only a target; each was predicted from the position before it
const BITS = 12, ROWS = 8, LATER = 2;  // the surprise of the darkest colour; rows of the tables; masked tokens among them
const PICTURE = Math.min(64, seen);  // rows of a head's picture, and its columns
const $ = (id) => document.getElementById(id);
const text = (i) => data.vocabulary[data.tokens[i]];
const HINT = 1 / 5;  // a head has a hint if one kind of token gets more than this share of its weight
const state = { token: data.given, mode: "surprise", place: (depth - 1) * heads };  // head state.place % heads of its layer
const chosenLayer = () => Math.floor(state.place / heads), chosenHead = () => state.place % heads;

function element(name, properties = {}, ...children) {
  const made = Object.assign(document.createElement(name), properties);
  made.append(...children);
  return made;
}

// --- queries, keys and values ---

const layers = [];  // the numbers of each layer, unpacked when they are first needed

async function unpack(layer) {  // see `_pack` in gpt/sampling/insight.py
  const packed = atob($(`layer${layer}`).textContent), bytes = new Uint8Array(packed.length);
  for (let i = 0; i < bytes.length; i++) bytes[i] = packed.charCodeAt(i);
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  const halves = new Uint8Array(await new Response(stream).arrayBuffer()), size = halves.length / 2;
  const bits = new Uint32Array(size);
  for (let i = 0; i < size; i++) bits[i] = (halves[i] << 16) | (halves[size + i] << 24);
  layers[layer] = new Float32Array(bits.buffer);
}

const QUERY = 0, KEY = 1, VALUE = 2, ADDED = 3, BEFORE = 4;  // from VALUE on only the first numbers are stored; BEFORE has no heads

function vector(kind, layer, head, token) {
  const size = kind < VALUE ? width : data.numbers, sizes = [width, width, data.numbers, data.numbers];
  const start = sizes.slice(0, kind).reduce((sum, one) => sum + one, 0) * heads * seen + (head * seen + token) * size;
  return layers[layer].subarray(start, start + size);
}

function score(query, layer, head, token) {
  const key = vector(KEY, layer, head, token);
  let sum = 0;
  for (let d = 0; d < width; d++) sum += query[d] * key[d];
  return sum / Math.sqrt(width);
}

function attentionWeights(layer, head, token) {
  const query = vector(QUERY, layer, head, token), scores = range(token + 1).map((i) => score(query, layer, head, i));
  const most = Math.max(...scores), powers = scores.map((one) => Math.exp(one - most));
  const sum = powers.reduce((a, b) => a + b, 0);
  return powers.map((power) => power / sum);
}

// --- the text ---

const range = (n, start = 0) => Array.from({ length: n }, (_, i) => start + i);
const spans = range(count).map((i) => {
  const span = element("span", { className: i < data.given ? "token" : "token new", textContent: text(i), id: `token${i}` });
  span.setAttribute("role", "option");
  span.addEventListener("click", () => choose({ token: i }));
  span.addEventListener("mouseenter", () => show(i));
  span.addEventListener("mouseleave", () => show(state.token));
  $("text").append(span, "\n".repeat(text(i).split("\u23ce").length - 1));
  return span;
});

function show(i) {  // colours and words for the token under the mouse, or for the chosen one
  if (!layers[chosenLayer()]) return;
  const bits = data.expected[i].bits;
  const surprise = bits === null ? "the first token: nothing was expected" : `probability ${percent(2 ** -bits)}, surprise ${bits.toFixed(2)} bits`;
  $("chosen").textContent = `token ${i + 1} of ${count}: \u201c${text(i)}\u201d, ${surprise}`;
  const weights = state.mode === "attention" ? attentionWeights(chosenLayer(), chosenHead(), i - 1) : null;  // nothing comes before the first token
  const most = weights && (i ? Math.max(...weights) : 1);
  $("legend-low").textContent = weights ? "0%" : "0 bits";
  $("legend-high").textContent = weights ? percent(most) : `${BITS} bits`;
  spans.forEach((span, j) => {
    const share = weights ? (weights[j] ?? 0) / most : Math.min(1, (data.expected[j].bits ?? 0) / BITS);
    const strength = (0.85 * share).toFixed(2);
    if (span.strength !== strength) span.style.setProperty("--strength", (span.strength = strength));  // styling is slow
  });
}

// --- the panels ---

const percent = (p) => (p >= 0.1 ? `${(100 * p).toFixed(0)}%` : p >= 0.001 ? `${(100 * p).toFixed(1)}%` : "<0.1%");
const bar = (p) => element("td", { className: "bar" }, element("span", { style: `width:${(100 * p).toFixed(1)}%` }));
const row = (...cells) => element("tr", {}, ...cells);
const cell = (content, className = "") => element("td", { className }, content);
const label = (textContent, scope = "row") => element("th", { scope, textContent });
const table = (...rows) => element("div", { className: "scroll" }, element("table", {}, ...rows));

function numbers(name, values, most = Math.max(...values.map(Math.abs)), digits = 2) {  // a row, coloured by size
  return row(label(name), ...Array.from(values, (value) => {
    const made = cell(value === -Infinity ? "\u2212\u221e" : value.toFixed(digits), `number ${value < 0 ? "minus" : "plus"}`);
    made.style.setProperty("--strength", (value === -Infinity ? 0 : (0.6 * Math.abs(value)) / most).toFixed(3));
    return made;
  }));
}

function showExpected() {
  const { likeliest, rank } = data.expected[state.token], drawn = likeliest.some((one) => one.length > 2);
  $("expected-how").textContent = likeliest.length === 0 ? "Nothing comes before the first token."
    : drawn ? "The likeliest tokens, with their probabilities before and after temperature and filters. The token that was drawn is bold."
    : "The likeliest tokens in this place. The one in the text is bold.";
  const titles = likeliest.length ? ["rank", "", "model", "", ...(drawn ? ["drawn from", ""] : [])] : [];
  $("expected").replaceChildren(table(row(...titles.map((title) => label(title, "col"))), ...likeliest.map(([id, p, left], i) => {
    const own = id === data.tokens[state.token] ? "own" : "", cells = [cell(own ? rank : i + 1, "number"), cell(data.vocabulary[id], left === 0 ? "cut" : own)];
    return row(...cells, cell(percent(p), "number"), bar(p), ...(drawn ? [cell(left === 0 ? "cut" : percent(left), "number"), bar(left)] : []));
  })));
}

function showLayers() {
  const place = state.token - 1;
  $("layers").replaceChildren(place < 0 ? "Nothing comes before the first token." : table(...data.layers.map((layer, i) => row(
    label(i ? `after block ${i}` : "embedding"),
    ...layer[place].map(([id, p]) => cell(`${data.vocabulary[id]} ${percent(p)}`, id === data.tokens[state.token] ? "own" : "")),
  ))));
}

function showSteps() {  // the words are those of docs/attention.md
  const layer = chosenLayer(), head = chosenHead(), token = state.token - 1;  // the position that predicted the chosen token
  if (token < 0) {
    $("head-how").textContent = "Nothing comes before the first token.";
    return $("steps").replaceChildren();
  }
  const weights = attentionWeights(layer, head, token), attended = [...weights.keys()].sort((a, b) => weights[b] - weights[a]).slice(0, ROWS);
  const shown = [...new Set([...attended, token])].sort((a, b) => a - b), share = shown.reduce((sum, i) => sum + weights[i], 0);
  const all = [...shown, ...range(Math.min(LATER, seen - token - 1), token + 1)];
  const scores = all.map((i) => score(vector(QUERY, layer, head, token), layer, head, i)), most = Math.max(...scores.map(Math.abs));
  const context = range(data.numbers).map((d) => weights.reduce((sum, weight, i) => sum + weight * vector(VALUE, layer, head, i)[d], 0));
  const added = Array.from(vector(ADDED, layer, head, token)), before = Array.from(vector(BEFORE, layer, 0, token));
  const together = before.map((_, d) => range(heads).reduce((sum, h) => sum + vector(ADDED, layer, h, token)[d], data.biases[layer][d]));
  const vectors = (kind, tokens) => {
    const first = tokens.map((i) => Array.from(vector(kind, layer, head, i).subarray(0, data.numbers)));
    const largest = Math.max(...first.flat().map(Math.abs));
    return table(...tokens.map((i, r) => numbers(`${i + 1} ${text(i)}`, first[r], largest)));
  };
  const title = (textContent) => element("h3", { textContent }), how = (textContent) => element("p", { className: "how", textContent });
  $("head-how").textContent = `How head ${head + 1} of layer ${layer + 1} looked back from \u201c${text(token)}\u201d to predict \u201c${text(token + 1)}\u201d: the tokens that it attended to most, together ${percent(share)} of the weight`
    + `${width > data.numbers ? `, and the first ${data.numbers} of ${width} numbers of each vector` : ""}.`;
  $("steps").replaceChildren(
    title("1. Query: what this token looks for"), vectors(QUERY, [token]),
    title("2. Keys: what each token offers to be found by"), vectors(KEY, all),
    title("3. Attention scores, causal mask, attention weights"),
    how(`A score is the query times a key, divided by the square root of ${width}. The mask sets the scores of later tokens to minus infinity; softmax turns each score into a weight, and all weights sum to one.`),
    table(row(label(""), ...all.map((i) => label(`${i + 1} ${text(i)}`, "col"))),
      numbers("scores", scores, most),
      numbers("masked", all.map((i, r) => (i > token ? -Infinity : scores[r])), most),
      numbers("weights", all.map((i) => weights[i] ?? 0), 1, 4)),
    title("4. Values: what each token passes on"), vectors(VALUE, shown),
    title("5. Context vector: the average of all values with these weights"), table(numbers("context", context)),
    title("6. Output projection: what the head adds to the residual stream"),
    how(`The output projection turns each context vector into ${data.channels} numbers, which are added to the residual stream. The layer\u2019s attention adds the sum of all heads and a bias.`),
    table(numbers("this head", added), numbers("all heads", together), numbers("before", before), numbers("after", before.map((one, d) => one + together[d]))),
  );
}

const pictures = range(depth * heads).map(() => element("canvas", { width: PICTURE, height: PICTURE }));
const hints = pictures.map(() => element("span"));
$("heads-how").textContent = "A row for each layer. In a head\u2019s picture each row is a token that attends, and each column one that it attends to; darker is more. "
  + "If one kind of token gets more than a fifth of the weight, a hint names it: the token before, the first token, the token itself, or earlier ones that are the same. The first two rows do not count.";

function hintOf(sums) {  // of the average weight that each kind of token gets
  const [name, most] = Object.entries(sums).reduce((a, b) => (b[1] > a[1] ? b : a));
  return most > HINT ? `${name} ${percent(most)}` : "";
}

function drawHeads(layer) {  // a row for each token that attends, or for some of a long text, darker for more attention
  const places = range(PICTURE + 1).map((i) => Math.floor((i * seen) / PICTURE));
  const blue = getComputedStyle(document.documentElement).getPropertyValue("--cool").split(",").map(Number);
  const looking = places.slice(1).map((end) => end - 1), counted = looking.filter((token) => token > 1).length;
  pictures.slice(layer * heads, (layer + 1) * heads).forEach((canvas, head) => {
    const context = canvas.getContext("2d"), image = context.createImageData(PICTURE, PICTURE);
    const sums = { before: 0, first: 0, itself: 0, same: 0 };
    range(PICTURE).forEach((r) => {
      const token = looking[r], weights = attentionWeights(layer, head, token);
      if (token > 1) {
        sums.before += weights[token - 1] / counted;
        sums.first += weights[0] / counted;
        sums.itself += weights[token] / counted;
        weights.forEach((weight, i) => { if (i < token && data.tokens[i] === data.tokens[token]) sums.same += weight / counted; });
      }
      range(PICTURE).forEach((c) => {
        const most = Math.max(0, ...weights.slice(places[c], places[c + 1]));
        image.data.set([...blue, 255 * Math.sqrt(most)], 4 * (r * PICTURE + c));  // so that small weights show
      });
    });
    context.putImageData(image, 0, 0);
    hints[layer * heads + head].textContent = hintOf(sums);
  });
}

// --- choosing ---

function radios(group, key, values, name, across = 1) {  // `across` buttons are in a row
  const buttons = values.map((value, i) => {
    const button = element("button", { type: "button" }, ...name(value));
    button.setAttribute("role", "radio");
    button.addEventListener("click", () => choose({ [key]: value }));
    button.addEventListener("keydown", (event) => {
      const step = { ArrowRight: 1, ArrowDown: across, ArrowLeft: -1, ArrowUp: -across, Home: -i, End: values.length - 1 - i }[event.key];
      if (step === undefined) return;
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

const checks = [
  radios($("mode-buttons"), "mode", ["surprise", "attention"], (mode) => [mode === "surprise" ? mode : "attention that predicted the chosen token"]),
  radios($("heads"), "place", range(depth * heads), (i) => [pictures[i], hints[i]], heads),
];
$("heads").style.gridTemplateColumns = `repeat(${heads + 1}, max-content)`;
[...$("heads").children].forEach((button, i) => {
  button.setAttribute("aria-label", `layer ${Math.floor(i / heads) + 1}, head ${(i % heads) + 1}`);
  if (i % heads === 0) button.before(element("span", { textContent: `layer ${i / heads + 1}` }));
});
$("heads").prepend(element("span"), ...range(heads).map((i) => element("span", { textContent: `head ${i + 1}` })));

async function choose(change) {
  spans[state.token].setAttribute("aria-selected", false);
  Object.assign(state, change);
  spans[state.token].setAttribute("aria-selected", true);
  $("text").setAttribute("aria-activedescendant", `token${state.token}`);
  document.body.dataset.mode = state.mode;
  checks.forEach((check) => check());
  showExpected();
  showLayers();
  if ("token" in change) {
    const span = spans[state.token], box = $("text");
    if (span.offsetTop < box.scrollTop || span.offsetTop > box.scrollTop + box.clientHeight - 32) box.scrollTop = span.offsetTop - 64;
  }
  if (!layers[chosenLayer()]) await unpack(chosenLayer());
  if (!layers[chosenLayer()]) return;  // another one was chosen in the meantime
  show(state.token);
  showSteps();
}

async function drawAll() {  // layer by layer, so that the page responds in between
  for (const layer of range(depth)) {
    if (!layers[layer]) await unpack(layer);
    drawHeads(layer);
    await new Promise((resume) => setTimeout(resume));
  }
}

$("text").addEventListener("keydown", (event) => {
  const step = { ArrowRight: 1, ArrowDown: 10, ArrowLeft: -1, ArrowUp: -10, Home: -count, End: count }[event.key];
  if (!step) return;
  event.preventDefault();
  choose({ token: Math.max(0, Math.min(count - 1, state.token + step)) });
});
$("omitted").textContent = data.omitted ? `${data.omitted} more tokens were written after the text had outgrown the model\u2019s context; they are not shown.` : "";
$("facts").textContent = Object.entries(data.facts).map(([key, value]) => `${key.replaceAll("_", "-")} ${value}`).join(" \u00b7 ");
choose({ token: state.token }).then(drawAll);

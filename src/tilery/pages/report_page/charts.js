"use strict";
// What the drawn charts share: scales, axes, markers, words of a mark.

function logScale(low, high, from, to) {
  const [a, b] = [Math.log(low), Math.log(high)];
  return (value) => from + ((Math.log(value) - a) / (b - a || 1)) * (to - from);
}

function linearScale(low, high, from, to) {
  return (value) => from + ((value - low) / (high - low || 1)) * (to - from);
}

function decades(low, high) {
  const made = [];
  for (let power = Math.ceil(Math.log10(low) - 1e-9); 10 ** power <= high * (1 + 1e-9); power += 1)
    made.push(10 ** power);
  return made;
}

/** Decades, and 2 and 5 between them where decades are few. */
function ticks(low, high) {
  const whole = decades(low, high);
  if (whole.length > 2) return whole;
  return decades(low / 10, high)
    .flatMap((value) => [value, 2 * value, 5 * value])
    .filter((v) => v >= low && v <= high);
}

function plainTick(value) {
  return value >= 1000 ? `${value / 1000}k` : String(Number(value.toPrecision(1)));
}

// Corners at unit size, a form per language; a circle has none.
const MARKERS = [
  [],
  [[-1, -1], [1, -1], [1, 1], [-1, 1]],
  [[0, -1.3], [1.2, 0.9], [-1.2, 0.9]],
  [[0, -1.35], [1.35, 0], [0, 1.35], [-1.35, 0]],
  [[0, 1.3], [1.2, -0.9], [-1.2, -0.9]],
  [[-0.4, -1.2], [0.4, -1.2], [0.4, -0.4], [1.2, -0.4], [1.2, 0.4], [0.4, 0.4], [0.4, 1.2], [-0.4, 1.2], [-0.4, 0.4],
    [-1.2, 0.4], [-1.2, -0.4], [-0.4, -0.4]],
  [[-0.6, -1.1], [0.6, -1.1], [1.25, 0], [0.6, 1.1], [-0.6, 1.1], [-1.25, 0]],
  [[-1.1, -1.1], [0, -0.5], [1.1, -1.1], [0.5, 0], [1.1, 1.1], [0, 0.5], [-1.1, 1.1], [-0.5, 0]],
];

function markerPath(language, r) {
  const corners = MARKERS[(LANGUAGES[language]?.marker ?? 0) % MARKERS.length];
  if (!corners.length) return `M${-r},0a${r},${r} 0 1,0 ${2 * r},0a${r},${r} 0 1,0 ${-2 * r},0`;
  return `M${corners.map(([x, y]) => `${x * r},${y * r}`).join("L")}z`;
}

function swatch(language) {
  const form = svg("path", { class: language.peer ? "mark peer" : "mark", d: markerPath(language.name, 4.5) });
  return svg(
    "svg",
    {
      class: "swatch",
      viewBox: "-7 -7 14 14",
      "aria-hidden": "true",
      style: { color: `var(--language-${language.number})` },
    },
    form,
  );
}

/** A mark of a row at a place: colour and form say the language, hollow says peer. */
function mark(row, x, y, radius) {
  const drawn = svg("path", {
    class: isKernel(row) ? "mark" : "mark peer",
    d: markerPath(row.language, radius),
    transform: `translate(${x.toFixed(1)},${y.toFixed(1)})`,
    style: { color: colour(row) },
    role: "img",
    "aria-label": rowWords(row).filter(Boolean).join(", "),
  });
  return explained(drawn, () => rowWords(row), row);
}

function rowWords(row) {
  const ratio = ratioOf(row);
  return [
    row.kernel,
    `${row.op} · ${caseWords(row)}`,
    row.timed && `${time(row.ms)} · ${rate(row)}`,
    isNumber(row.roof) && `${percent(row.roof)} of the roof`,
    ratio && `${interval(ratio)} of ${peerName(state.peer)}`,
    SEVERAL.run && `run ${DATA.runs[row.run].id}`,
  ];
}

/** A frame with log axes, of which x may be another; gives the scales and the group to draw into. */
function frame(holder, { height, x, y, xTicks, yTicks, xWords, yWords, label, xScale = logScale, top = 14 }) {
  const width = Math.max(280, holder.clientWidth);
  const box = { left: 58, right: width - 14, top, bottom: height - 42 };
  const toX = xScale(x[0], x[1], box.left, box.right);
  const toY = logScale(y[0], y[1], box.bottom, box.top);
  const drawn = svg("svg", { viewBox: `0 0 ${width} ${height}`, role: "group", "aria-label": label, class: "chart" });
  for (const [value, words] of yTicks) {
    drawn.append(
      svg("line", { class: "grid", x1: box.left, x2: box.right, y1: toY(value), y2: toY(value) }),
      svg("text", { class: "tick", x: box.left - 8, y: toY(value) + 4, "text-anchor": "end" }, words),
    );
  }
  for (const [value, words] of xTicks) {
    drawn.append(
      svg("line", { class: "grid", x1: toX(value), x2: toX(value), y1: box.top, y2: box.bottom }),
      svg("text", { class: "tick", x: toX(value), y: box.bottom + 18, "text-anchor": "middle" }, words),
    );
  }
  drawn.append(
    svg("text", { class: "axis", x: (box.left + box.right) / 2, y: height - 4, "text-anchor": "middle" }, xWords),
    svg(
      "text",
      { class: "axis", transform: `translate(13,${(box.top + box.bottom) / 2})rotate(-90)`, "text-anchor": "middle" },
      yWords,
    ),
  );
  holder.replaceChildren(drawn);
  return { drawn, toX, toY, box };
}

function spread(values, room) {
  const [low, high] = [Math.min(...values), Math.max(...values)];
  return [low / room, high * room];
}

function figure(title, words, ...content) {
  return html(
    "section",
    { class: "panel" },
    html("h3", {}, title),
    words && html("p", { class: "words" }, words),
    ...content,
  );
}

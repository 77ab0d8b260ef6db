"use strict";
// What a row opens to.

function details(row) {
  const peers = Object.entries(row.ratios).filter(([peer]) => peer !== row.kernel);
  const used = isNumber(row.registers)
    ? `${row.registers} registers, ${digits(row.spills)} bytes spilled, ${bytes(row.shared)} shared`
    : "";
  const conditions = [
    isNumber(row.clock) && `${digits(row.clock, 4)} MHz`,
    isNumber(row.power) && `${digits(row.power)} W`,
    isNumber(row.temperature) && `${digits(row.temperature, 2)} °C`,
  ];
  const facts = [
    ["Config", row.config && html("code", {}, row.config)],
    ["Why", row.reason],
    ["Time", row.ms !== undefined && `${time(row.ms)}, 95 % within ${time(row.ms_low)} – ${time(row.ms_high)}`],
    ["Rounds", row.samples.length > 1 && rounds(row)],
    ["Timed by", row.timed_by && [row.timed_by, row.inputs && `inputs ${row.inputs}`].filter(Boolean).join(", ")],
    ["Work", isNumber(row.flops) && `${digits(row.flops / 1e9)} GFLOP, ${bytes(row.bytes)}`],
    [
      "Rate",
      [isNumber(row.tflops) && `${digits(row.tflops)} TFLOP/s`, isNumber(row.gbps) && `${digits(row.gbps)} GB/s`]
        .filter(Boolean)
        .join(", "),
    ],
    ["Of the roof", percent(row.roof)],
    ...peers.map(([peer, ratio]) => [`× ${peerName(peer)}`, interval(ratio)]),
    ["Error", row.error !== undefined && `${exponent(row.error)} against float64`],
    ["While timed", conditions.filter(Boolean).join(", ")],
    ["Compiled", [row.arch, used].filter(Boolean).join(": ")],
    ["Device", row.device],
    ["Run", DATA.runs[row.run].id],
  ];
  const stages = Object.entries(DATA.code[row.code] ?? {});
  return html(
    "div",
    { class: "details" },
    factList(facts),
    stages.map(([stage, packed]) => codeFold(row, stage, packed)),
  );
}

/** The rounds in their order: a drift is seen before it is believed. */
function rounds(row) {
  const [width, height] = [180, 28];
  const numbers = row.samples.map(Number).filter(Number.isFinite);
  const [low, high] = [Math.min(...numbers), Math.max(...numbers)];
  const x = (i) => 2 + (i / (numbers.length - 1)) * (width - 4);
  const y = (value) => height - 3 - ((value - low) / (high - low || 1)) * (height - 6);
  const points = numbers.map((value, i) => `${x(i).toFixed(1)},${y(value).toFixed(1)}`).join(" ");
  const words = `${numbers.length} rounds from ${time(low)} to ${time(high)}`;
  return [
    svg(
      "svg",
      { class: "rounds", viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": words },
      svg("polyline", { points: points }),
    ),
    html("span", {}, ` ${words}`),
  ];
}

function codeFold(row, stage, packed) {
  const text = html("pre", { tabindex: "0", "aria-label": `${stage} of ${row.op} ${row.kernel}` }, "…");
  const opened = async (event) => {
    if (!event.target.open || text.dataset.there) return;
    text.dataset.there = "yes";
    text.textContent = await inflate(packed).catch((error) => `This browser cannot inflate it: ${error}`);
  };
  return html(
    "details",
    { class: "code", ontoggle: opened },
    html("summary", {}, stage === "ir" ? "IR" : stage.length <= 4 ? stage.toUpperCase() : stage),
    text,
  );
}

async function inflate(packed) {
  const raw = Uint8Array.from(atob(packed), (letter) => letter.charCodeAt(0));
  const stream = new Blob([raw]).stream().pipeThrough(new DecompressionStream("deflate"));
  return new Response(stream).text();
}

"use strict";
// FLOP/s against FLOP/byte, under the ceilings that were measured on the device.

function drawRoofline(holder, rows, ceilings) {
  const dots = rows.filter(
    (row) => row.timed && row.intensity > 0 && row.tflops > 0 && !row.kernel.startsWith("control:"),
  );
  if (!dots.length)
    return holder.replaceChildren(html("p", { class: "words" }, "No timed row says its arithmetic and traffic."));
  const roofs = roofLines(ceilings);
  const tops = roofs.map((roof) => roof.rate);
  const y = spread([...dots.map((row) => row.tflops), ...tops], 2.4);
  const x = spread([...dots.map((row) => row.intensity), ...roofs.map((roof) => roof.ridge)], 2.2);
  const made = frame(holder, {
    height: holder.clientWidth < 480 ? 320 : 420,
    x,
    y,
    label: "Roofline",
    xTicks: decades(...x).map((v) => [v, plainTick(v)]),
    yTicks: decades(...y).map((v) => [v, plainTick(v)]),
    xWords: "FLOP per byte",
    yWords: "TFLOP/s",
  });
  if (ceilings) drawRoofs(made, x, y, roofs, ceilings);
  const marks = [...dots].sort((a, b) => isKernel(a) - isKernel(b) || a.intensity - b.intensity);
  made.drawn.append(...marks.map((row) => mark(row, made.toX(row.intensity), made.toY(row.tflops), 4.5)));
  roving(made.drawn, ".mark");
}

/** One line per rate of arithmetic; rates within a tenth of each other share a label. */
function roofLines(ceilings) {
  const made = [];
  const slope = ceilings ? Math.max(ceilings.read ?? 0, ceilings.copy ?? 0) / 1e12 : 0;
  for (const [dtype, flops] of Object.entries(ceilings?.flops ?? {}).sort((a, b) => b[1] - a[1])) {
    const rateOf = flops / 1e12;
    const near = made.find((roof) => rateOf > roof.rate * 0.9);
    if (near) near.names.push(dtype);
    else made.push({ names: [dtype], rate: rateOf, ridge: rateOf / slope });
  }
  return made;
}

function drawRoofs({ drawn, toX, toY, box }, x, y, roofs, ceilings) {
  const clip = `clip-${Math.random().toString(36).slice(2)}`;
  const area = { x: box.left, y: box.top, width: box.right - box.left, height: box.bottom - box.top };
  const inside = svg("g", { "clip-path": `url(#${clip})` });
  drawn.append(svg("defs", {}, svg("clipPath", { id: clip }, svg("rect", area))), inside);
  const top = roofs[0]?.rate ?? y[1];
  const slopes = [
    ["read", ceilings.read],
    ["copy", ceilings.copy],
  ].filter(([, speed]) => speed > 0);
  for (const [name, speed] of slopes) {
    const end = Math.min(x[1], (top * 1e12) / speed);
    const at = (value) => [toX(value), toY((value * speed) / 1e12)];
    const [[x1, y1], [x2, y2]] = [at(x[0]), at(end)];
    inside.append(svg("line", { class: `roof ${name}`, x1, y1, x2, y2 }));
  }
  for (const roof of roofs) {
    inside.append(
      svg("line", { class: "roof", x1: toX(roof.ridge), x2: box.right, y1: toY(roof.rate), y2: toY(roof.rate) }),
    );
    const words = `${roof.names.join(", ")} ${digits(roof.rate)} TFLOP/s`;
    inside.append(
      svg("text", { class: "roof-words", x: box.right - 4, y: toY(roof.rate) - 6, "text-anchor": "end" }, words),
    );
  }
  if (slopes.length) slopeWords(inside, slopes, { toX, toY, x, y });
}

/** Along the slope, above it, a little in from where it enters the frame. */
function slopeWords(inside, slopes, { toX, toY, x, y }) {
  const speed = Math.max(...slopes.map(([, one]) => one)) / 1e12;
  const start = Math.max(x[0], y[0] / speed) * 1.25;
  const angle =
    (Math.atan2(toY(start * 10 * speed) - toY(start * speed), toX(start * 10) - toX(start)) * 180) / Math.PI;
  const words = slopes.map(
    ([name, one]) => `${name} ${one >= 1e12 ? `${digits(one / 1e12)} TB/s` : `${digits(one / 1e9)} GB/s`}`,
  );
  const at = `translate(${toX(start)},${toY(start * speed) - 7})rotate(${angle})`;
  inside.append(svg("text", { class: "roof-words", transform: at }, words.join(" · ")));
}

"use strict";
// Time against size: a chart per problem that was timed at several sizes, a line per kernel.

function drawSizes(holder, device, ceilings) {
  const charts = DATA.sizes
    .filter((chart) => chart.device === device)
    .map((chart) => ({ ...chart, members: chart.rows.map((i) => DATA.rows[i]).filter(passes) }))
    .filter((chart) => chart.members.length);
  holder.replaceChildren(
    ...charts.map((chart) =>
      html(
        "figure",
        { class: "size" },
        html(
          "figcaption",
          {},
          html("b", {}, chart.op),
          ` ${chart.fixed.replace("dtype=", "").replaceAll("=", " ").replaceAll(",", " ·")}`,
        ),
        html("div", { class: "plot" }),
      ),
    ),
  );
  charts.forEach((chart, i) => drawSize(holder.querySelectorAll(".plot")[i], chart, ceilings));
  if (!charts.length)
    holder.replaceChildren(html("p", { class: "words" }, "No problem was timed at more than one size."));
}

function drawSize(holder, { op, x, members }, ceilings) {
  const sizes = [...new Set(members.map((row) => row.params[x]))].sort((a, b) => a - b);
  const xs = spread(sizes, sizes.length > 1 ? (sizes.at(-1) / sizes[0]) ** 0.05 : 2);
  const ys = spread(
    members.map((row) => row.ms),
    1.5,
  );
  const made = frame(holder, {
    height: 270,
    x: xs,
    y: ys,
    label: `Time of ${op} against ${x}`,
    xTicks: sizeTicks(sizes, xs, holder.clientWidth),
    yTicks: ticks(...ys).map((v) => [v, v < 1 ? `${plainTick(v * 1e3)} µs` : `${plainTick(v)} ms`]),
    xWords: x,
    yWords: "time",
  });
  const launch = (ceilings?.launch_us ?? 0) / 1e3;
  if (launch > ys[0] && launch < ys[1]) {
    made.drawn.append(
      svg("line", {
        class: "roof copy",
        x1: made.box.left,
        x2: made.box.right,
        y1: made.toY(launch),
        y2: made.toY(launch),
      }),
      svg(
        "text",
        { class: "roof-words", x: made.box.right - 4, y: made.toY(launch) - 5, "text-anchor": "end" },
        "a launch",
      ),
    );
  }
  for (const line of sizeLines(members, x)) {
    const at = line.map((row) => [made.toX(row.params[x]), made.toY(row.ms)]);
    const dash = isKernel(line[0]) ? (line[0].kernel.includes(".") ? "6 3" : null) : "2 3";
    made.drawn.append(
      svg("polyline", {
        class: "line",
        points: at.map((p) => p.map((v) => v.toFixed(1)).join()).join(" "),
        "stroke-dasharray": dash,
        style: { color: colour(line[0]) },
      }),
    );
  }
  made.drawn.append(...members.map((row) => mark(row, made.toX(row.params[x]), made.toY(row.ms), 3.6)));
  roving(made.drawn, ".mark");
}

/** Peers first, so that kernels lie above them. */
function sizeLines(members, x) {
  const lines = grouped(
    members.map((row) => ({ row, line: `${row.kernel} ${row.run}` })),
    "line",
  );
  return [...lines.values()]
    .map((line) => line.map(({ row }) => row).sort((a, b) => a.params[x] - b.params[x]))
    .sort((a, b) => isKernel(a[0]) - isKernel(b[0]));
}

/** Sizes as they are, but none so near the one before it that the numbers touch. */
function sizeTicks(sizes, xs, width) {
  const place = logScale(xs[0], xs[1], 0, width - 72);
  const kept = [];
  for (const size of sizes) if (!kept.length || place(size) - place(kept.at(-1)) > 38) kept.push(size);
  return kept.map((size) => [size, String(size)]);
}

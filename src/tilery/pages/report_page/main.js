"use strict";
// A section per device, what was tuned and the table, drawn anew whenever a filter changes.

function buildDevice({ name, ceilings }, i) {
  const roof = ceilings
    ? "Dots are kernels, hollow ones peers; the lines are ceilings measured on this device."
    : "Dots are kernels, hollow ones peers. This run kept no measured ceilings: no roof is drawn.";
  const part = (kind) => html("div", { class: kind });
  byId("devices").append(
    html(
      "section",
      { class: "device", id: `device-${i}`, tabindex: "-1", "aria-labelledby": `device-${i}-title` },
      html("div", { class: "section-head" }, html("h2", { id: `device-${i}-title` }, name)),
      html("ul", { class: "tiles" }),
      html(
        "div",
        { class: "pair" },
        figure("Roofline", roof, part("roofline")),
        figure(
          "By op and language",
          "Geometric mean over cases; of a language's variants the best of each case.",
          part("heat-map"),
        ),
      ),
      figure("Case by case", "Bars start at 1: to the right is faster. Whiskers are 95 % intervals.", part("bar-list")),
      figure("Time against size", null, part("size-list")),
    ),
  );
}

function drawDevices(rows) {
  DATA.devices.forEach(({ name, ceilings }, i) => {
    const section = byId(`device-${i}`);
    const own = rows.filter((row) => row.device === name);
    section.hidden = !own.some((row) => row.timed);
    if (section.hidden) return;
    const part = (kind) => section.querySelector(`.${kind}`);
    drawTiles(part("tiles"), own);
    drawRoofline(part("roofline"), own, ceilings);
    drawHeat(part("heat-map"), own);
    drawBars(part("bar-list"), own, name);
    drawSizes(part("size-list"), name, ceilings);
  });
}

function draw() {
  const rows = DATA.rows.filter(passes);
  hideTip();
  syncFilters();
  byId("nothing").hidden = rows.length > 0 || CANDIDATES.some(passes);
  drawDevices(rows);
  drawLandscapes();
  drawTable(rows);
}

buildTheme();
buildHead();
buildFilters();
DATA.devices.forEach(buildDevice);
buildLandscapes();
buildTable();
byId("rows").hidden = !hasTable();
draw();
addEventListener("hashchange", () => {
  state = readHash();
  draw();
});
addEventListener("keydown", (event) => event.key === "Escape" && hideTip());
addEventListener("scroll", moveTip, { passive: true });
let width = innerWidth;
addEventListener("resize", () => {
  if (innerWidth === width) return; // a phone's address bar changes the height only
  width = innerWidth;
  drawDevices(DATA.rows.filter(passes));
  drawLandscapes();
});

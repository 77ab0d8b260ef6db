"use strict";
// The head of the page: where the figures come from, and what to know before believing them. And its colours.

function buildHead() {
  const words = [
    CHOICES.device.join(", "),
    DATA.rows.length > 0 && count(DATA.rows.length, "row"),
    CANDIDATES.length > 0 && `${count(CANDIDATES.length, "candidate")} of ${count(DATA.tunes.length, "tuned problem")}`,
    count(DATA.runs.length, "run"),
  ];
  byId("lede").textContent = words.filter(Boolean).join(" · ");
  byId("runs").append(
    html(
      "details",
      { class: "runs", open: DATA.runs.length < 3 && innerWidth > 640 },
      html("summary", {}, "How it was measured"),
      DATA.runs.map(runFacts),
    ),
  );
  byId("notices").append(...DATA.notices.map(noticeOf));
  const how = "Medians with 95 % intervals; ratios round by round within one run.";
  byId("foot").append(`Made with tilery ${DATA.made.tilery} on ${date(DATA.made.at)}. ${how}`);
  const jumps = [
    ...DATA.devices.map((device, i) => [`device-${i}`, device.name]),
    ...(DATA.tunes.length ? [["tunes", "Tuned"]] : []),
    ...(hasTable() ? [["rows", "Rows"]] : []),
  ];
  byId("sections").append(
    ...jumps.map(([id, name]) => html("a", { href: `#${id}`, onclick: (event) => jump(event, id) }, name)),
  );
  const [skip, end] = [document.querySelector(".skip"), hasTable() ? "rows" : "tunes"];
  if (!hasTable()) skip.textContent = "Skip to the candidates";
  skip.addEventListener("click", (event) => jump(event, end));
}

/** A run of the tuner alone has candidates and no other rows. */
function hasTable() {
  return DATA.rows.length > 0 || !DATA.tunes.length;
}

/** Not through the hash: that holds the filters. */
function jump(event, id) {
  event.preventDefault();
  byId(id).scrollIntoView();
  byId(id).focus({ preventScroll: true });
}

function runFacts(run) {
  const { machine } = run;
  const versions = ["tilery", "torch", "cuda", "python"]
    .filter((name) => machine[name])
    .map((name) => `${name} ${machine[name]}`);
  const languages = Object.entries(machine.languages ?? {}).map(([name, version]) => `${name} ${version}`);
  const where = [machine.gpu, machine.arch !== "cpu" && machine.arch, machine.cpu, machine.system];
  const commit = run.git?.commit?.slice(0, 12);
  const facts = [
    ["Run", run.id],
    ["Command", html("code", {}, run.command)],
    ["Started", date(run.started)],
    ["Finished", run.finished ? date(run.finished) : "stopped in the middle"],
    ["Machine", where.filter(Boolean).join(", ")],
    ["Versions", versions.join(", ")],
    ["Languages", languages.join(", ")],
    ["Commit", commit ? `${commit}${run.git.changed ? ", with changes" : ""}` : "not a checkout"],
  ];
  return factList(facts);
}

function noticeOf({ text, items, status, grave }) {
  const showRows = () => {
    change({ ...EVERYTHING, status });
    byId("rows").scrollIntoView();
  };
  const show = status && html("button", { type: "button", class: "link", onclick: showRows }, "Show them");
  const which =
    items.length > 0 &&
    html(
      "details",
      {},
      html("summary", {}, "Which"),
      html(
        "ul",
        {},
        items.map((item) => html("li", {}, item)),
      ),
    );
  return html("div", { class: `notice${grave ? " grave" : ""}`, role: "note" }, html("p", {}, text), which, show);
}

function buildTheme() {
  const button = byId("theme");
  const isDark = () =>
    (document.documentElement.dataset.theme ??
      (matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light")) === "dark";
  const say = () => {
    button.textContent = isDark() ? "Light" : "Dark";
    button.setAttribute("aria-label", `Switch to ${isDark() ? "light" : "dark"} colours`);
  };
  const kept = storage((local) => local.getItem("tilery-theme"));
  if (kept === "dark" || kept === "light") document.documentElement.dataset.theme = kept;
  button.addEventListener("click", () => {
    const theme = isDark() ? "light" : "dark";
    document.documentElement.dataset.theme = theme;
    storage((local) => local.setItem("tilery-theme", theme));
    say();
  });
  say();
}

/** A browser may forbid storage to pages from files; then the choice lasts as long as the page. */
function storage(use) {
  try {
    return use(localStorage);
  } catch {
    return null;
  }
}

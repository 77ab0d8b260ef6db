"use strict";
// The bar of filters. Its chips are the legend of every chart.

function choice(name, words, all) {
  const said = (value) => (name === "peer" ? peerWords(value) : value);
  const options = CHOICES[name].map((value) => html("option", { value }, said(value)));
  const select = html(
    "select",
    { id: `choose-${name}`, onchange: (event) => change({ [name]: event.target.value }) },
    all ? html("option", { value: "" }, all) : null,
    options,
  );
  return html("div", { class: "choice" }, html("label", { for: `choose-${name}` }, words), select);
}

function peerWords(peer) {
  return peer === "control:copy" ? "a copy of the same bytes" : peerName(peer);
}

function chip(language) {
  const isOn = () => state.language.includes(language.name);
  const others = () => state.language.filter((name) => name !== language.name);
  const press = () => change({ language: isOn() ? others() : [...others(), language.name] });
  const name = html("span", {}, kernelName(language.name));
  return html(
    "button",
    { type: "button", class: "chip", "data-language": language.name, onclick: press },
    swatch(language),
    name,
  );
}

function buildFilters() {
  let waiting = 0;
  const typed = (event) => {
    state = { ...state, q: event.target.value }; // at once: another filter may be changed before this one is drawn
    clearTimeout(waiting);
    waiting = setTimeout(() => change({}), 120);
  };
  byId("filters").append(
    html(
      "div",
      { class: "choices" },
      html(
        "div",
        { class: "choice text" },
        html("label", { for: "choose-q" }, "Filter"),
        html("input", { type: "search", id: "choose-q", placeholder: "kernel, case, reason …", oninput: typed }),
      ),
      choice("op", "Op", "all ops"),
      SEVERAL.device && choice("device", "Device", "all devices"),
      choice("status", "Status", "any status"),
      SEVERAL.inputs && choice("inputs", "Inputs", "cold and warm"),
      SEVERAL.run && choice("run", "Run", "all runs"),
      DATA.peers.length > 0 && choice("peer", "Held against"),
      html(
        "button",
        { type: "button", id: "reset", class: "quiet", onclick: () => change({ ...EVERYTHING }) },
        "Reset",
      ),
    ),
    html(
      "div",
      { class: "chips", role: "group", "aria-label": "Languages; none pressed shows all" },
      DATA.languages.map(chip),
    ),
  );
  byId("filters").addEventListener("submit", (event) => event.preventDefault());
}

function syncFilters() {
  for (const name of ["q", "op", "device", "status", "inputs", "run", "peer", "along"]) {
    const control = byId(`choose-${name}`);
    if (control && control.value !== state[name]) control.value = state[name];
  }
  for (const chip of document.querySelectorAll(".chip"))
    chip.setAttribute("aria-pressed", String(state.language.includes(chip.dataset.language)));
}

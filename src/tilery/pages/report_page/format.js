"use strict";
// Numbers in words.

function isNumber(value) {
  return typeof value === "number" && Number.isFinite(value);
}

function digits(value, count = 3) {
  if (value === undefined || value === null) return "";
  if (Number.isNaN(value)) return "NaN";
  if (!Number.isFinite(value)) return value > 0 ? "∞" : "−∞";
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size >= 10 ** count) return Math.round(value).toLocaleString("en-US");
  return value.toFixed(Math.min(8, Math.max(0, count - 1 - Math.floor(Math.log10(size)))));
}

function time(ms, count = 4) {
  if (!isNumber(ms)) return digits(ms);
  return ms < 1 ? `${digits(ms * 1e3, count)} µs` : `${digits(ms, count)} ms`;
}

function times(ratio) {
  if (!isNumber(ratio)) return digits(ratio);
  return `${ratio < 0.095 ? digits(ratio, 2) : ratio < 10 ? ratio.toFixed(2) : ratio.toFixed(1)}×`;
}

function percent(share) {
  return isNumber(share) ? `${(100 * share).toFixed(0)} %` : digits(share);
}

function exponent(value) {
  return isNumber(value) && value !== 0 ? value.toExponential(1).replace("-", "−") : digits(value);
}

function bytes(count) {
  if (!isNumber(count)) return digits(count);
  const step = [
    ["GB", 1e9],
    ["MB", 1e6],
    ["kB", 1e3],
  ].find(([, size]) => count >= size);
  return step ? `${digits(count / step[1])} ${step[0]}` : `${count} B`;
}

/** TFLOP/s where arithmetic is the question. */
function rate(row) {
  if (!isNumber(row.gbps) || !isNumber(row.tflops)) return "";
  if (row.tflops * 1e3 > 20 * row.gbps) return `${digits(row.tflops)} TFLOP/s`;
  return row.gbps >= 1000 ? `${digits(row.gbps / 1e3)} TB/s` : `${digits(row.gbps)} GB/s`;
}

/** m 64 · n 4096 · bf16, and whether its inputs came from the caches, which is not the rule. */
function caseWords(row) {
  const words = Object.entries(row.params).map(([name, value]) =>
    name === "dtype" ? `${value}` : `${name}\u00a0${value}`,
  );
  return [...words, row.inputs === "warm" && "warm"].filter(Boolean).join("\u00a0· ");
}

function peerName(peer) {
  return peer.split(":")[1] ?? peer;
}

/** liger for baseline:liger: where it stands, its hollow mark says that it is a peer. */
function kernelName(kernel) {
  return kernel.includes(":") ? peerName(kernel) : kernel;
}

function interval([ratio, low, high]) {
  return `${times(ratio)}, 95 % within ${digits(low)} – ${digits(high)}`;
}

function count(number, noun) {
  return `${number} ${noun}${number === 1 ? "" : "s"}`;
}

function date(text) {
  const when = new Date(text);
  if (Number.isNaN(when.getTime())) return String(text ?? "");
  return `${when.toISOString().slice(0, 16).replace("T", " ")} UTC`;
}

function geometricMean(values) {
  return values.length ? Math.exp(values.reduce((sum, value) => sum + Math.log(value), 0) / values.length) : null;
}

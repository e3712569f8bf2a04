// The look of a strip: the reason for the precision, one cell per step, and the steps that were rerun. The whole report
// opens over the page: it is too large for a node.
// Reports contain untrusted text (names of models and layers), so it is set as text, never as markup.
import { words } from "./strip_texts.js"

const SIGNS = { half: "16", fp32: "32", rerun: "↻", cached: "=", failed: "✕" }
const MAX_CELLS = 60 // in longer runs equal neighbours share one
const MAX_NAMED = 6 // failed steps
const MIN_WIDTH = 120 // px, a node's minimum
const MAX_ROWS = 10 // of a text without cells
const ROW = 14 // px
const STYLE = `
.onediff-guard { display: flex; flex-direction: column; gap: 4px; font: 12px/1.35 Inter, Arial, sans-serif;
  color: var(--input-text, #ddd); box-sizing: border-box; }
.onediff-guard > .head { display: flex; flex-direction: column; gap: 4px; user-select: text; overflow-wrap: anywhere; }
.onediff-guard .said { white-space: pre-wrap; max-height: 8em; overflow-y: auto; }
.onediff-guard .stale { opacity: 0.4; }
.onediff-guard .verdict { font-weight: 600; }
.onediff-guard .verdict:empty { display: none; }
.onediff-guard .verdict:is(.ok, .rescued) { color: #4cae72; }
.onediff-guard .verdict:is(.ended, .unguarded) { color: #f0b429; }
.onediff-guard .verdict.broken { color: #f06a6a; }
.onediff-guard .what { font-weight: 600; font-size: 13px; }
.onediff-guard .cells { display: flex; flex-wrap: wrap; gap: 2px; max-height: 70px; overflow-y: auto; }
.onediff-guard .told { display: flex; flex-wrap: wrap; align-items: center; gap: 3px 10px; margin: 2px 0; }
.onediff-guard .cells > i { width: 8px; }
.onediff-guard .cell { font: 600 10px/16px ui-monospace, Consolas, Menlo, monospace; min-width: 16px; height: 16px;
  padding: 0 2px; text-align: center; border-radius: 3px; box-sizing: border-box; color: #fff; white-space: nowrap; }
.onediff-guard .half { background: #2f7d4f; }
.onediff-guard .fp32 { background: #2d66ad; }
.onediff-guard .rerun { background: #f0b429; color: #201400; }
.onediff-guard .cached { background: #6b6b6b; }
.onediff-guard .failed { background: #c22f2f; }
.onediff-guard .legend { display: flex; flex-wrap: wrap; gap: 2px 10px; color: var(--descrip-text, #999); }
.onediff-guard .legend > span > .cell { display: inline-block; margin-right: 4px; }
.onediff-guard button { all: unset; cursor: pointer; align-self: start; color: var(--descrip-text, #999); }
.onediff-guard button:hover, .onediff-guard button:focus-visible { color: var(--input-text, #ddd);
  text-decoration: underline; }
.onediff-guard textarea { flex: 1 1 auto; width: 100%; resize: none; box-sizing: border-box; padding: 4px 6px;
  border: 1px solid var(--border-color, #4e4e4e); border-radius: 4px; color: var(--input-text, #ddd);
  background: var(--comfy-input-bg, #222); font: 11px/${ROW}px ui-monospace, Consolas, Menlo, "DejaVu Sans Mono", monospace;
  overflow: auto; }
.onediff-guard-report { width: min(1000px, 90vw); max-height: 80vh; box-sizing: border-box; padding: 16px; gap: 12px;
  border: 1px solid var(--border-color, #4e4e4e); border-radius: 8px; color: var(--input-text, #ddd);
  background: var(--comfy-menu-bg, #353535); }
.onediff-guard-report[open] { display: flex; flex-direction: column; }
.onediff-guard-report pre { margin: 0; overflow: auto; white-space: pre-wrap; overflow-wrap: anywhere; user-select: text;
  font: 12px/1.4 ui-monospace, Consolas, Menlo, "DejaVu Sans Mono", monospace; }
.onediff-guard-report button { all: unset; outline: revert; cursor: pointer; align-self: end; padding: 5px 12px; border-radius: 6px;
  border: 1px solid var(--border-color, #4e4e4e); }
`

/** @returns {HTMLElement} */
function element(tag, name = "", text = "", children = []) {
  const made = document.createElement(tag)
  made.className = name
  made.textContent = text
  made.append(...children)
  return made
}

const cell = (state, text = SIGNS[state]) => element("span", `cell ${state}`, text)

/** Returns one cell per step; in long runs, one for equal neighbours. */
function cellsOf(runs, say) {
  const many = runs.reduce((sum, run) => sum + run.cells.length, 0) > MAX_CELLS
  return runs.flatMap((run, nth) => {
    const made = nth ? [element("i")] : []
    for (let first = 0, end; first < run.cells.length; first = end) {
      const state = run.cells[first]
      for (end = first + 1; many && run.cells[end] === state; ) end++
      const one = cell(state, end - first > 1 ? `${SIGNS[state]}×${end - first}` : undefined)
      const span = end - first > 1 ? `${first + 1}–${end}` : `${end}`
      one.title = `${run.plan.component} · ${callsOf(span, run, say)}: ${state === "half" ? run.plan.dtype : say[state]}`
      made.push(one)
    }
    return made
  })
}

const NOUNS = { denoiser: "step", text_encoder: "prompt" } // other components have parts

/** Names calls by their numbers: "step 3", "steps 1–4", "prompt 1". */
function callsOf(which, { plan, in_calls: inCalls }, say) {
  const [one, several] = say[inCalls ? "call" : (NOUNS[plan.component] ?? "part")]
  return (/\D/.test(which) ? several : one).replace("{}", which)
}

/** Writes ascending numbers as ranges: "1–4, 7". */
function spansOf(numbers) {
  const spans = []
  for (const number of numbers) {
    const last = spans.at(-1)
    if (last?.end === number - 1) last.end = number
    else spans.push({ first: number, end: number })
  }
  return spans.map(({ first, end }) => (first === end ? `${first}` : `${first}–${end}`))
}

/** Says how often each kind of cell occurs, and names the steps if few failed. */
function legendOf(runs, say) {
  const steps = {}
  for (const run of runs) run.cells.forEach((state, step) => (steps[state] ??= []).push(step + 1))
  const dtypes = [...new Set(runs.map((run) => run.plan.dtype).filter((dtype) => dtype !== "fp32"))].join(", ")
  const kinds = Object.keys(SIGNS).filter((state) => steps[state])
  return kinds.map((state) => {
    const [meaning, at] = [(state === "half" && dtypes) || say[state], steps[state]]
    const spans = spansOf(at)
    const named = ["rerun", "failed"].includes(state) && runs.length === 1 && spans.length <= MAX_NAMED
    const text = `${meaning}: ${named ? callsOf(spans.join(", "), runs[0], say) : at.length}`
    return element("span", "", "", [...(kinds.length > 1 ? [cell(state)] : []), text])
  })
}

/** Shows a report over the page, until it is closed by its button or Escape. */
function openReport(text) {
  const close = element("button", "", words().close)
  const dialog = element("dialog", "onediff-guard-report", "", [element("pre", "", text), close])
  close.onclick = () => dialog.close()
  dialog.onclose = () => dialog.remove()
  dialog.onkeydown = (event) => event.stopPropagation() // keeps keys from the canvas
  document.body.append(dialog)
  dialog.showModal()
}

/** The DOM of one strip. It calls `resized()` when it needs another height. */
export class StripView {
  constructor(resized) {
    if (!document.getElementById("onediff-guard-style")) {
      const style = element("style", "", STYLE)
      style.id = "onediff-guard-style"
      document.head.append(style)
    }
    this.resized = resized
    this.text = ""
    this.whole = "" // the report that the button opens
    this.verdict = element("div", "verdict")
    this.said = element("div", "said")
    this.report = element("div", "head")
    this.button = element("button", "", `▸ ${words().open}`)
    this.button.onclick = () => openReport(this.whole)
    this.button.style.display = "none" // until there is a report
    this.head = element("div", "head", "", [this.verdict, this.said, this.report, this.button])
    this.full = element("textarea")
    this.full.readOnly = true
    this.full.spellcheck = false
    this.full.dataset.captureWheel = "true" // newer pages scroll it, and do not zoom
    this.full.hidden = true
    this.root = element("div", "onediff-guard", "", [this.head, this.full])
    this.headHeight = 90 // px, until it is laid out
    new ResizeObserver(() => this.measure()).observe(this.head)
  }

  /** Whether there is text and nothing else, as from a Self-Test: it is shown on the node. */
  get plain() {
    return !this.report.childElementCount && !this.verdict.textContent
  }

  /** The height of the whole strip, px. */
  get height() {
    return this.headHeight + (this.full.hidden ? 0 : this.textHeight + 4)
  }

  measure() {
    const { offsetWidth: width, offsetHeight: height } = this.head
    if (width < MIN_WIDTH || height === this.headHeight) return // hidden, or not laid out yet
    this.headHeight = height
    this.resized()
  }

  get textHeight() {
    return Math.min(this.full.value.split("\n").length + 1, MAX_ROWS) * ROW + 10
  }

  /** Shows a running node's progress text, which ComfyUI's page sends with characters escaped. */
  say(text) {
    this.said.textContent = new DOMParser().parseFromString(text, "text/html").body.textContent
    this.report.classList.add("stale")
    this.full.classList.add("stale")
  }

  /** Marks the report as an earlier run's, with this text. "": it is this run's, from a cached node. */
  age(inWords) {
    this.said.textContent = inWords
    for (const part of [this.verdict, this.report, this.full]) part.classList.toggle("stale", Boolean(inWords))
  }

  /** @param {{text: string[], onediff_guard: object[]}} output of a node that ran
   * @param {[string, string]} verdict whether the result can be used: "ok", "rescued", "ended", "unguarded" or "broken", and in
   * words; both empty where none is computed
   * @param {boolean} brief on nodes of other packs, which have little room: the verdict and the cells */
  show(output, [verdict, inWords], brief = false) {
    this.brief = brief
    const say = words()
    this.verdict.className = `verdict ${verdict}`
    this.verdict.textContent = inWords
    const reports = output.onediff_guard.filter((report) => report?.cells)
    this.text = (output.text ?? []).join("\n")
    this.said.textContent = ""
    this.report.replaceChildren(...(reports.length ? this.summary(reports, say) : []))
    this.whole = reports.length ? reports.map((report) => report.text).join("\n\n") : this.text
    this.button.style.display = ""
    for (const part of [this.report, this.full]) part.classList.remove("stale")
    this.full.value = this.whole
    this.full.hidden = !this.plain
    this.full.style.display = this.plain ? "" : "none"
    this.full.style.minHeight = `${this.textHeight}px`
  }

  summary(reports, say) {
    const runs = reports.flatMap((report) => [...report.before, report])
    const told = element("div", "told", "", [
      element("div", "cells", "", cellsOf(runs, say)),
      element("div", "legend", "", legendOf(runs, say)),
    ])
    if (this.brief) return [told]
    const [why, ...notes] = this.text.split("\n")
    const dtypes = [...new Set(reports.map(({ plan }) => plan.dtype))].join(", ")
    return [
      element("div", "what", `${dtypes} · ${reports.at(-1).architecture}`),
      element("div", "why", why),
      told,
      ...notes.map((line) => element("div", "", line)),
    ]
  }
}

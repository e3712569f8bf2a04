// Puts a strip on each of our nodes that has reported: after a run, from the cache, after undo and in another tab.
import { app } from "../../scripts/app.js"
import { api } from "../../scripts/api.js"
import { StripView } from "./strip_view.js"
import { historyOf } from "./history.js"
import { words } from "./strip_texts.js"

const OURS = "OneDiffGuard" // the prefix of our node types
const NAME = "$$node-text-preview" // ComfyUI's own widget for a node's progress text
const PICTURE = "$$canvas-image-preview" // its widget for pictures, which fills the node to its end
const LATE = "OneDiffGuardNaNGuardNative" // reports when other nodes sample or decode, not when it runs or is cached
const MAX_REPORTS = 64 // of one prompt, on a node that many samplers use
const MARGIN = 10
const NO_WORKFLOW = "00000000-0000-0000-0000-000000000000" // of a graph that was loaded in API format

const rootGraph = () => app.rootGraph ?? app.graph

const isKnown = (workflow) => Boolean(workflow) && workflow !== NO_WORKFLOW

/** Returns whether a run's workflow is the one on the canvas. True if no page queued the run: then it is unknown. */
const isOpen = (workflow) => !isKnown(workflow) || workflow === rootGraph().id

/** Returns the node's widget, and creates it if there is none. */
function stripOf(node) {
  const there = node.widgets?.find((widget) => widget.name === NAME)
  if (there?.strip) return there.strip
  const above = node.widgets?.findIndex(({ name }) => name === NAME || name === PICTURE) ?? -1
  if (there) node.removeWidget(there)
  const strip = new StripView(() => resize(node, strip))
  const widget = node.addDOMWidget(NAME, "onediff_guard", strip.root, {
    serialize: false, // not in prompts
    margin: MARGIN,
    getValue: () => strip.text,
    setValue: (text) => strip.say(String(text)),
    getMinHeight: () => strip.height + 2 * MARGIN,
    getMaxHeight: () => (strip.plain ? undefined : strip.height + 2 * MARGIN),
  })
  widget.serialize = false // not in files
  widget.strip = strip
  if (above >= 0) node.widgets.splice(above, 0, node.widgets.pop())
  return strip
}

/** By how much the user has enlarged another pack's node since it got a strip. Nodes 2.0 sets heights by itself. */
function grown(node, { laidOut }) {
  if (!laidOut) return [0, 0]
  const height = globalThis.LiteGraph?.vueNodesMode ? 0 : Math.max(0, node.size[1] - laidOut[1])
  return [node.size[0] - laidOut[0], height]
}

/** The size of another pack's node without its strip. */
const withoutStrip = (node, strip) => strip.without.map((side, nth) => side + grown(node, strip)[nth])

function resize(node, strip) {
  const [width, height] = node.computeSize()
  const [wider, higher] = strip.without ? grown(node, strip) : [0, 0]
  const least = (strip.without ?? node.size)[1]
  node.setSize([Math.max(node.size[0], width), Math.max(least, height) + higher])
  strip.laidOut = [node.size[0] - wider, node.size[1] - higher]
  node.setDirtyCanvas?.(true, true)
}

function show(node, output) {
  if (node.type?.startsWith(OURS) && output?.onediff_guard) stripOf(node).show(output, ownVerdict(output.onediff_guard))
}

/** Returns whether a stage's last run did not finish: a node may try again. */
function hasEnded(reports) {
  const last = new Map(reports.map((report) => [report?.plan?.component, report]))
  return [...last.values()].some((report) => report?.ended)
}

/** Returns whether the result of one of our nodes can be used, and its text; both empty for a node without a result. */
function ownVerdict(reports) {
  const cells = reports.flatMap((report) => [...(report?.before ?? []), report]).flatMap((run) => run?.cells ?? [])
  const reruns = cells.filter((cell) => cell === "rerun").length
  const ended = hasEnded(reports)
  const good = ended ? "ended" : reruns ? "rescued" : "ok"
  const verdict = cells.includes("failed") ? "broken" : cells.length || ended ? good : ""
  const say = words()
  const sampled = reports.some((report) => report?.plan?.component === "denoiser") // else the node only passes its input on
  const inWords = verdict && `${sampled ? say.result : say.stage} ${say.verdicts[verdict].replace("{}", reruns)}`
  return [verdict, inWords]
}

/** Returns one of our nodes by its execution id, and the widget of its text: a strip, or ComfyUI's own. */
function ownText(id) {
  const [, node] = nodeByExecutionId(id)
  return [node, node?.type?.startsWith(OURS) ? node.widgets?.find(({ name }) => name === NAME) : undefined]
}

/** Removes an earlier run's text from a node that runs now. A report stays, and is marked as an earlier run's. */
function forgetText(id) {
  const [node, widget] = ownText(id)
  if (widget && !widget.strip?.whole) node.removeWidget(widget)
}

/** Replaces the progress text of a node that has stopped. */
function sayOnOwn(id, inWords) {
  const [node, widget] = ownText(id)
  if (widget) stripOf(node).age(inWords)
}

/** Shows why a prompt ended, on the node where it did. */
async function sayWhereEnded({ prompt_id: prompt, node_id: id }, inWords) {
  const extra = (await historyOf(prompt))?.prompt[3]
  if ((started ?? prompt) === prompt && isOpen(extra?.extra_pnginfo?.workflow?.id)) sayOnOwn(id, inWords)
}

/** Returns the nodes of all graphs by their names among outputs: the id, after the subgraph's id inside one. */
function nodesByLocator() {
  const root = rootGraph()
  const found = root.nodes.map((node) => [String(node.id), node])
  for (const graph of root.subgraphs?.values() ?? [])
    found.push(...graph.nodes.map((node) => [`${graph.id}:${node.id}`, node]))
  return new Map(found)
}

/** Finds a node by its execution id. "57:3" is node 3 in the subgraph that is node 57. */
function nodeByExecutionId(id) {
  const [last, ...outer] = String(id).split(":").reverse()
  const graph = outer.reduceRight((graph, id) => graph?.getNodeById(Number(id))?.subgraph, rootGraph())
  return [graph, graph?.getNodeById(Number(last))]
}

function showAll(outputs) {
  for (const [locator, node] of nodesByLocator()) show(node, outputs?.[locator])
}

/** Shows a text that ComfyUI did not send as the node's output, and stores it like an output. */
function keep(id, more) {
  const [graph, node] = nodeByExecutionId(id)
  if (!node) return
  const locator = graph === rootGraph() ? String(node.id) : `${graph.id}:${node.id}`
  app.nodeOutputs[locator] = more(app.nodeOutputs[locator])
  show(node, app.nodeOutputs[locator])
}

const VERDICTS = ["rescued", "ended", "unguarded", "broken"] // worst last
const SEVERITIES = { rescued: "success", ended: "warn", unguarded: "warn", broken: "error" } // ComfyUI's names
const SECONDS = { rescued: 10, ended: 10, unguarded: 30, broken: 30 }

// Nodes of other packs on which a guard has reported in this prompt, by id: type, workflow, reports and title
const others = new Map()
// By node: its strip on the canvas, and how to restore the node. A subgraph that is used twice has one.
const placed = new Map()
// Reports of native guards on the last prompt, by workflow and node: a page loses them with a tab, and a workflow that
// is not open has none
const late = new Map()
const MOST_LATE = 32
let started // the prompt that runs; undefined on a page opened after its start
let running // the execution id of the node that runs; null between prompts

/** Puts a strip on another pack's node. Returns the strip, and a function that undoes all its changes to the node.
 * Files and undo never contain it. */
function stripOnOther(node) {
  const { widgets, onSerialize } = node
  const without = [...node.size]
  const strip = stripOf(node)
  strip.without = without
  resize(node, strip)
  node.onSerialize = function (saved) {
    onSerialize?.apply(this, arguments)
    saved.size = withoutStrip(node, strip)
    if (!widgets) for (const key of ["widgets_values", "widgets_values_named"]) delete saved[key]
  }
  const putBack = () => {
    const size = withoutStrip(node, strip)
    const widget = node.widgets?.find((widget) => widget.strip)
    if (widget) node.removeWidget(widget)
    if (!widgets && !node.widgets?.length) node.widgets = widgets
    node.onSerialize = onSerialize
    node.setSize(size)
  }
  return { strip, putBack }
}

function newPrompt() {
  for (const node of nodesByLocator().values()) {
    const widget = node.type?.startsWith(OURS) ? node.widgets?.find((widget) => widget.strip) : undefined
    if (widget?.strip.whole) widget.strip.age(words().earlier)
    else if (widget) node.removeWidget(widget) // no report to keep
  }
  for (const { putBack } of placed.values()) putBack()
  placed.clear()
  others.clear()
}

/** Returns whether a node's result can be used, by its guards' reports, and the text that says so. */
function verdictOf(outputs) {
  const isBroken = ({ outcomes }) => (outcomes?.["non-finite"] ?? 0) + (outcomes?.saturated ?? 0) > 0
  const verdicts = outputs.map(({ onediff_guard: reports, unguarded }) =>
    reports.some(isBroken) ? "broken" : unguarded ? "unguarded" : hasEnded(reports) ? "ended" : "rescued",
  )
  const verdict = VERDICTS.findLast((each) => verdicts.includes(each))
  const reasons = new Set(outputs.flatMap(({ unguarded }) => unguarded ?? []))
  return [verdict, [words()[verdict], ...reasons].join(" ")]
}

/** Shows the report of an inserted guard on the node that samples or decodes: only if something happened, and once for
 * each sampling there. The node's own outputs stay as they are. */
function reportedOnOther(id, type, workflow, output) {
  if (!others.has(id)) others.set(id, { type, workflow, title: type, outputs: [] })
  others.get(id).outputs.push(output)
  showOnOther(id)
}

function showOnOther(id) {
  const other = others.get(id)
  const [, node] = isOpen(other.workflow) ? nodeByExecutionId(id) : []
  if (node?.type !== other.type) return
  Object.assign(other, { node, title: node.title })
  if (!placed.has(node)) placed.set(node, stripOnOther(node)) // a reopened workflow has other nodes
  const outputs = [...others.values()].filter((each) => each.node === node).flatMap((each) => each.outputs)
  placed.get(node).strip.show(
    {
      text: [...new Set(outputs.flatMap(({ text }) => text.join("\n").split("\n")))],
      onediff_guard: outputs.flatMap(({ onediff_guard }) => onediff_guard).slice(-MAX_REPORTS),
    },
    verdictOf(outputs),
    true,
  )
}

/** Shows, at the end of a prompt, one toast for all nodes with the same text: strips in subgraphs, in App mode and in
 * another tab are not visible. */
function sayAtEnd() {
  const told = new Map() // text → severity and nodes
  for (const { title, outputs } of others.values()) {
    const [verdict, inWords] = verdictOf(outputs)
    const titles = told.get(inWords)?.titles ?? []
    told.set(inWords, { verdict, titles: [...titles, title] })
  }
  for (const [inWords, { verdict, titles }] of told)
    app.extensionManager?.toast?.add({
      severity: SEVERITIES[verdict],
      summary: "NaN Guard",
      detail: `${inWords} (${[...new Set(titles)].join(", ")})`,
      life: SECONDS[verdict] * 1000,
    })
}

/** Keeps a native guard's report until its workflow is open again; a toast shows problems at once. */
function remember(node, prompt, workflow, output) {
  const key = `${workflow} ${node}`
  const known = late.get(key)
  const outputs = [...(known?.prompt === prompt ? known.outputs : []), output].slice(-MAX_REPORTS)
  late.delete(key) // latest last
  late.set(key, { node, prompt, workflow, outputs })
  if (late.size > MOST_LATE) late.delete(late.keys().next().value)
  if (isOpen(workflow)) return
  const isAmiss = ({ cells }) => cells?.some((cell) => cell === "rerun" || cell === "failed")
  if (outputs.some(({ onediff_guard: reports }) => reports.some(isAmiss)))
    others.set(`missed ${key}`, { type: "", workflow, title: "NaN Guard", outputs })
}

/** Shows the kept reports of the open workflow. They are kept further: the page may load older outputs after this. */
function deliver() {
  for (const [key, { node, prompt, workflow, outputs }] of late) {
    if (!isOpen(workflow)) continue
    others.delete(`missed ${key}`)
    for (const output of outputs) add(node, prompt, output, true)
  }
}

/** Adds a native guard's report to those of the same prompt. once: unless it is already there. */
function add(node, prompt, output, once = false) {
  if (nodeByExecutionId(node)[1]?.type !== LATE) return
  keep(node, (earlier) => {
    const before = earlier?.prompt?.[0] === prompt ? earlier : { text: [], onediff_guard: [] }
    const had = new Set(once ? before.onediff_guard.map((report) => JSON.stringify(report)) : [])
    const all = [...before.onediff_guard, ...output.onediff_guard.filter((report) => !had.has(JSON.stringify(report)))]
    let over = all.length - MAX_REPORTS
    const reports = all.filter(({ cells }) => over <= 0 || cells?.includes("failed") || !over--)
    const lines = [...before.text, ...output.text].flatMap((text) => text.split("\n"))
    return { text: [[...new Set(lines)].join("\n")], prompt: [prompt], onediff_guard: reports }
  })
}

/** Shows a native guard's report, which comes after its node has run, once for each sampler of a prompt. */
function reported({ node, type, prompt, workflow, output }) {
  if (type) reportedOnOther(node, type, workflow, output)
  else {
    if (isKnown(workflow)) remember(node, prompt, workflow, output)
    if (isOpen(workflow)) add(node, prompt, output)
  }
}

/** Shows a cached node's output, which ComfyUI before 0.20 does not send again and a reopened page lacks. */
async function recall({ nodes, prompt_id: prompt }) {
  const lacking = nodes.filter((id) => {
    const [, node] = nodeByExecutionId(id)
    return node?.type?.startsWith(OURS) && !node.widgets?.some((widget) => widget.strip)
  })
  if (!lacking.length) return
  const outputs = (await (await api.fetchApi(`/history/${prompt}`)).json())[prompt]?.outputs ?? {}
  for (const id of lacking) if (outputs[id]?.onediff_guard) keep(id, () => outputs[id])
}

app.registerExtension({
  name: "OneDiffGuard.Strip",
  setup() {
    let cached = { nodes: [] }
    api.addEventListener("onediff_guard.report", ({ detail }) => reported(detail))
    api.addEventListener("execution_start", ({ detail }) => {
      started = detail.prompt_id
      newPrompt()
    })
    for (const end of ["execution_success", "execution_error", "execution_interrupted"])
      api.addEventListener(end, sayAtEnd)
    api.addEventListener("execution_cached", ({ detail }) => {
      cached = detail
      for (const id of detail.nodes) if (nodeByExecutionId(id)[1]?.type !== LATE) ownText(id)[1]?.strip?.age("")
    })
    api.addEventListener("execution_error", ({ detail }) =>
      sayWhereEnded(detail, `${words().failedHere} ${String(detail.exception_message).split("\n")[0]}`),
    )
    api.addEventListener("execution_interrupted", ({ detail }) => sayWhereEnded(detail, words().cancelledHere))
    api.addEventListener("reconnecting", () => running && sayOnOwn(running, words().lostHere))
    api.addEventListener("executing", ({ detail: node }) => {
      running = node
      if (node) forgetText(node)
      else recall(cached) // the history is complete now
    })
  },
  beforeRegisterNodeDef(type, { name }) {
    if (!name.startsWith(OURS)) return
    const { onExecuted } = type.prototype
    type.prototype.onExecuted = function (output) {
      onExecuted?.call(this, output)
      show(this, output)
    }
  },
  onNodeOutputsUpdated(outputs) { // of another tab, or a job from the queue
    showAll(outputs)
    if (Object.keys(outputs ?? {}).length) deliver() // none: the page is clearing the old workflow, which is still open
  },
  afterConfigureGraph() { // undo, another tab
    showAll(app.nodeOutputs)
    for (const [id, { workflow }] of others) if (isKnown(workflow)) showOnOther(id)
    deliver()
  },
})

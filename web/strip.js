// Puts a strip on each node of ours that has reported: after a run, from the cache, after undo and in another tab.
import { app } from "../../scripts/app.js"
import { api } from "../../scripts/api.js"
import { StripView } from "./strip_view.js"
import { historyOf } from "./history.js"
import { words } from "./strip_texts.js"

const OURS = "OneDiffGuard" // node types begin so
const NAME = "$$node-text-preview" // ComfyUI's own widget for a node's progress text: where there is one, it says it there
const PICTURE = "$$canvas-image-preview" // and its widget for pictures, which reaches down to the node's end
const LATE = "OneDiffGuardNaNGuardNative" // reports when others sample or decode, not when it runs or is remembered
const MOST_REPORTS = 64 // of one prompt, on a node that many samplers use
const MARGIN = 10
const NO_WORKFLOW = "00000000-0000-0000-0000-000000000000" // of a graph that the page got in API format

const rootGraph = () => app.rootGraph ?? app.graph

const isKnown = (workflow) => Boolean(workflow) && workflow !== NO_WORKFLOW

/** Whether the workflow of a run is the one on the canvas. Of a run that no page queued nobody knows: then it is. */
const isOpen = (workflow) => !isKnown(workflow) || workflow === rootGraph().id

/** The node's widget, made where it has none. */
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

/** What a person has made another pack's node larger since it got a strip. Nodes 2.0 sets heights by itself. */
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

/** Whether a stage did not come to its end: its last run, since a node may try again. */
function hasEnded(reports) {
  const last = new Map(reports.map((report) => [report?.plan?.component, report]))
  return [...last.values()].some((report) => report?.ended)
}

/** Whether the result of a node of ours can be used, and that in words; empty of one that computes none. */
function ownVerdict(reports) {
  const cells = reports.flatMap((report) => [...(report?.before ?? []), report]).flatMap((run) => run?.cells ?? [])
  const reruns = cells.filter((cell) => cell === "rerun").length
  const ended = hasEnded(reports)
  const good = ended ? "ended" : reruns ? "rescued" : "ok"
  const verdict = cells.includes("failed") ? "broken" : cells.length || ended ? good : ""
  const say = words()
  const sampled = reports.some((report) => report?.plan?.component === "denoiser") // else it is what it was given
  const inWords = verdict && `${sampled ? say.result : say.stage} ${say.verdicts[verdict].replace("{}", reruns)}`
  return [verdict, inWords]
}

/** A node of ours by its id in an execution, and its text's widget: a strip, or ComfyUI's own. */
function ownText(id) {
  const [, node] = nodeByExecutionId(id)
  return [node, node?.type?.startsWith(OURS) ? node.widgets?.find(({ name }) => name === NAME) : undefined]
}

/** Takes off what an earlier run said on a node that runs now. A report stays: it is marked as an earlier run's. */
function forgetText(id) {
  const [node, widget] = ownText(id)
  if (widget && !widget.strip?.whole) node.removeWidget(widget)
}

/** Replaces the progress that stands on a node which does not go on. */
function sayOnOwn(id, inWords) {
  const [node, widget] = ownText(id)
  if (widget) stripOf(node).age(inWords)
}

/** Says on the node where a prompt ended why it did. */
async function sayWhereEnded({ prompt_id: prompt, node_id: id }, inWords) {
  const extra = (await historyOf(prompt))?.prompt[3]
  if ((started ?? prompt) === prompt && isOpen(extra?.extra_pnginfo?.workflow?.id)) sayOnOwn(id, inWords)
}

/** Of all graphs: node by its name among outputs, which is its id, after its subgraph's in one. */
function nodesByLocator() {
  const root = rootGraph()
  const found = root.nodes.map((node) => [String(node.id), node])
  for (const graph of root.subgraphs?.values() ?? [])
    found.push(...graph.nodes.map((node) => [`${graph.id}:${node.id}`, node]))
  return new Map(found)
}

/** By an id as in an execution, "57:3": node 3 in the subgraph that is node 57. */
function nodeByExecutionId(id) {
  const [last, ...outer] = String(id).split(":").reverse()
  const graph = outer.reduceRight((graph, id) => graph?.getNodeById(Number(id))?.subgraph, rootGraph())
  return [graph, graph?.getNodeById(Number(last))]
}

function showAll(outputs) {
  for (const [locator, node] of nodesByLocator()) show(node, outputs?.[locator])
}

/** Shows what ComfyUI's page was not given as this node's output, where it is found again like one. */
function keep(id, more) {
  const [graph, node] = nodeByExecutionId(id)
  if (!node) return
  const locator = graph === rootGraph() ? String(node.id) : `${graph.id}:${node.id}`
  app.nodeOutputs[locator] = more(app.nodeOutputs[locator])
  show(node, app.nodeOutputs[locator])
}

const VERDICTS = ["rescued", "ended", "unguarded", "broken"] // the worst last
const SEVERITIES = { rescued: "success", ended: "warn", unguarded: "warn", broken: "error" } // of ComfyUI's toasts
const SECONDS = { rescued: 10, ended: 10, unguarded: 30, broken: 30 }

// Nodes of other packs on which a guard has reported in this prompt: by their ids, their type and workflow, what was
// reported, and what they are called
const others = new Map()
// Their strips on the canvas, and how a node is put back, by the node. A subgraph that is used twice has it once.
const placed = new Map()
// What native guards reported of the last prompt, by workflow and node: pages lose it with a tab, and a workflow that is
// not open lacks it
const late = new Map()
const MOST_LATE = 32
let started // the prompt that runs; undefined on a page that was opened since it started
let running // the node that runs, by its id in the execution; null between prompts

/** Puts a strip on another pack's node. Returns it, and what takes all that it changes about the node off again. Files
 * and undo never see it. */
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
    else if (widget) node.removeWidget(widget) // it has no report
  }
  for (const { putBack } of placed.values()) putBack()
  placed.clear()
  others.clear()
}

/** Whether the result of a node can be used, from what guards reported of it, and that in words. */
function verdictOf(outputs) {
  const isBroken = ({ outcomes }) => (outcomes?.["non-finite"] ?? 0) + (outcomes?.saturated ?? 0) > 0
  const verdicts = outputs.map(({ onediff_guard: reports, unguarded }) =>
    reports.some(isBroken) ? "broken" : unguarded ? "unguarded" : hasEnded(reports) ? "ended" : "rescued",
  )
  const verdict = VERDICTS.findLast((each) => verdicts.includes(each))
  const reasons = new Set(outputs.flatMap(({ unguarded }) => unguarded ?? []))
  return [verdict, [words()[verdict], ...reasons].join(" ")]
}

/** A guard that was inserted reports on the node that samples or decodes, only where something happened, and once for
 * each sampling there; that node's own outputs stay as they are. */
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
  if (!placed.has(node)) placed.set(node, stripOnOther(node)) // a workflow that was opened anew has other nodes
  const outputs = [...others.values()].filter((each) => each.node === node).flatMap((each) => each.outputs)
  placed.get(node).strip.show(
    {
      text: [...new Set(outputs.flatMap(({ text }) => text.join("\n").split("\n")))],
      onediff_guard: outputs.flatMap(({ onediff_guard }) => onediff_guard).slice(-MOST_REPORTS),
    },
    verdictOf(outputs),
    true,
  )
}

/** At the end of a prompt, one toast for all nodes of which the same is to be said: in subgraphs, in App mode and in
 * another tab nobody sees their strips. */
function sayAtEnd() {
  const told = new Map() // words → severity and nodes
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

/** Keeps a native guard's report for when its workflow is open again; until then a toast says what is amiss. */
function remember(node, prompt, workflow, output) {
  const key = `${workflow} ${node}`
  const known = late.get(key)
  const outputs = [...(known?.prompt === prompt ? known.outputs : []), output].slice(-MOST_REPORTS)
  late.delete(key) // the latest one comes last
  late.set(key, { node, prompt, workflow, outputs })
  if (late.size > MOST_LATE) late.delete(late.keys().next().value)
  if (isOpen(workflow)) return
  const isAmiss = ({ cells }) => cells?.some((cell) => cell === "rerun" || cell === "failed")
  if (outputs.some(({ onediff_guard: reports }) => reports.some(isAmiss)))
    others.set(`missed ${key}`, { type: "", workflow, title: "NaN Guard", outputs })
}

/** Shows what was reported of the workflow that is open now. It stays: the page may load older outputs after this. */
function deliver() {
  for (const [key, { node, prompt, workflow, outputs }] of late) {
    if (!isOpen(workflow)) continue
    others.delete(`missed ${key}`)
    for (const output of outputs) add(node, prompt, output, true)
  }
}

/** Adds a native guard's report to those of the same prompt. once: not where it is among them. */
function add(node, prompt, output, once = false) {
  if (nodeByExecutionId(node)[1]?.type !== LATE) return
  keep(node, (earlier) => {
    const before = earlier?.prompt?.[0] === prompt ? earlier : { text: [], onediff_guard: [] }
    const had = new Set(once ? before.onediff_guard.map((report) => JSON.stringify(report)) : [])
    const all = [...before.onediff_guard, ...output.onediff_guard.filter((report) => !had.has(JSON.stringify(report)))]
    let over = all.length - MOST_REPORTS
    const reports = all.filter(({ cells }) => over <= 0 || cells?.includes("failed") || !over--)
    const lines = [...before.text, ...output.text].flatMap((text) => text.split("\n"))
    return { text: [[...new Set(lines)].join("\n")], prompt: [prompt], onediff_guard: reports }
  })
}

/** A native guard reports after its node has run, once for each sampler of a prompt. */
function reported({ node, type, prompt, workflow, output }) {
  if (type) reportedOnOther(node, type, workflow, output)
  else {
    if (isKnown(workflow)) remember(node, prompt, workflow, output)
    if (isOpen(workflow)) add(node, prompt, output)
  }
}

/** ComfyUI before 0.20 does not send again what a cached node had to show; a page that was reopened lacks it. */
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
      else recall(cached) // the history has it all now
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
  onNodeOutputsUpdated(outputs) { // another tab, a job from the queue
    showAll(outputs)
    if (Object.keys(outputs ?? {}).length) deliver() // none: the page clears the old workflow, which is still there
  },
  afterConfigureGraph() { // undo, another tab
    showAll(app.nodeOutputs)
    for (const [id, { workflow }] of others) if (isKnown(workflow)) showOnOther(id)
    deliver()
  },
})

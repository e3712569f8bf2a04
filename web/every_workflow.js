// Guard every workflow: its settings, and the offer to run a black result again with guards.
import { app } from "../../scripts/app.js"
import { api } from "../../scripts/api.js"
import { historyOf } from "./history.js"
import { words } from "./strip_texts.js"

const OFFER = "OneDiffGuard.OfferRerun"
const MAX_OFFERED = 100 // the latest runs
// at the left: the page has its own buttons at the right, and App mode has its outputs in the middle
const STYLE = `position: fixed; left: 84px; bottom: 24px; z-index: 10000; width: 400px; max-width: 80vw;
  box-sizing: border-box; padding: 12px 14px; display: flex; flex-direction: column; gap: 10px;
  border-radius: 8px; font: 13px/1.4 Inter, Arial, sans-serif; color: var(--input-text, #ddd);
  background: var(--comfy-menu-bg, #353535); border: 1px solid #f0b429; box-shadow: 0 4px 16px rgba(0, 0, 0, 0.5);`
const BUTTON = `all: unset; outline: revert; cursor: pointer; padding: 5px 12px; border-radius: 6px; font-weight: 600;
  border: 1px solid var(--border-color, #4e4e4e);`
const FIRST_BUTTON = "background: #f0b429; border-color: #f0b429; color: #201400;"

/** Returns the errors that the server's answer gives for a prompt. */
function refusal(answer) {
  try {
    const { error, node_errors: nodes } = JSON.parse(answer)
    const ofNodes = Object.values(nodes ?? {}).flatMap(({ class_type: type, errors }) =>
      errors.map(({ message, details }) => `${type}: ${message}: ${details}`),
    )
    return ofNodes.join("\n") || error.message || answer
  } catch {
    return answer
  }
}

/** Queues a prompt of the history again with guards: with the same nodes and seed, and with cached outputs. */
async function runAgain(prompt) {
  const entry = await historyOf(prompt)
  if (!entry) throw new Error(words().gone)
  const [, , nodes, extra, targets] = entry.prompt
  const body = {
    prompt: nodes,
    partial_execution_targets: targets,
    client_id: api.clientId,
    // the history holds no credentials
    extra_data: { ...extra, auth_token_comfy_org: api.authToken, api_key_comfy_org: api.apiKey, onediff_guard: true },
  }
  const answer = await api.fetchApi("/prompt", {
    method: "POST",
    headers: { "Content-Type": "application/json" },
    body: JSON.stringify(body),
  })
  if (!answer.ok) throw new Error(refusal(await answer.text()))
}

let offered = [] // prompts, oldest first

/** Shows one offer for all black runs since the last answer: a queue may have many of them. */
function offer({ prompt, problem }) {
  if (app.extensionManager?.setting?.get(OFFER) === false) return
  offered = [...offered, prompt].slice(-MAX_OFFERED)
  document.getElementById("onediff-guard-offer")?.remove()
  const say = words()
  const box = document.createElement("div")
  box.id = "onediff-guard-offer"
  box.setAttribute("role", "alert")
  box.style.cssText = STYLE
  const text = document.createElement("div")
  text.textContent =
    offered.length > 1
      ? say.manyBlack.replace("{}", offered.length)
      : say.black.replace("{}", problem === "black" ? say.allBlack : say.nonFinite)
  const buttons = document.createElement("div")
  buttons.style.cssText = "display: flex; gap: 8px;"
  const button = (label, style, then) => {
    const made = document.createElement("button")
    made.textContent = label
    made.style.cssText = BUTTON + style
    made.onclick = () => {
      const prompts = offered
      offered = []
      box.remove()
      then(prompts)
    }
    buttons.append(made)
  }
  button(say.runAgain, FIRST_BUTTON, async (prompts) => {
    for (const each of prompts)
      try {
        await runAgain(each)
      } catch (error) {
        app.extensionManager?.toast?.add({ severity: "error", summary: "NaN Guard", detail: error.message, life: 8000 })
      }
  })
  button(say.notNow, "", () => {})
  box.append(text, buttons)
  document.body.append(box)
}

const setting = (sortOrder, id, name, tooltip, defaultValue) => ({
  id: `OneDiffGuard.${id}`,
  category: ["OneDiff Guard", "NaN Guard", id],
  name,
  tooltip,
  type: "boolean",
  sortOrder, // highest first
  defaultValue,
})

app.registerExtension({
  name: "OneDiffGuard.EveryWorkflow",
  settings: [
    setting(
      3,
      "EveryWorkflow",
      "Guard every workflow",
      "Guards each workflow that you run: a NaN or infinite step is recomputed in fp32. No workflow file is changed.",
      false,
    ),
    setting(
      2,
      "FastFp16",
      "Use fast fp16 on this card",
      "Needs 'Guard every workflow'. On cards without native bf16 (T4, V100, RTX 20), models run in fp16 with overflow protection, also those that ComfyUI runs in fp32.",
      false,
    ),
    setting(
      1,
      "OfferRerun",
      "Offer a rerun",
      "After a black result, offer to run the workflow again with the NaN Guard.",
      true,
    ),
  ],
  setup() {
    api.addEventListener("onediff_guard.black", ({ detail }) => offer(detail))
  },
})

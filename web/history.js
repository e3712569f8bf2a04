// Reads a prompt's entry in ComfyUI's history.
import { api } from "../../scripts/api.js"

const ATTEMPTS = 20 // the entry is written when the prompt has ended
const PAUSE = 500 // ms

/** @returns {Promise<object | undefined>} the prompt's entry; undefined if it never appears or no server answers */
export async function historyOf(prompt) {
  for (let attempt = 0; attempt < ATTEMPTS; attempt++) {
    try {
      const entry = (await (await api.fetchApi(`/history/${prompt}`)).json())[prompt]
      if (entry) return entry
    } catch {
      return
    }
    await new Promise((done) => setTimeout(done, PAUSE))
  }
}

// What ComfyUI's history has of a prompt.
import { api } from "../../scripts/api.js"

const ATTEMPTS = 20 // to find one, where it comes when it has ended
const PAUSE = 500 // ms

/** @returns {Promise<object | undefined>} the prompt's entry, undefined where it does not come, or no server */
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

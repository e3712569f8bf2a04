// Tells the server the page's language: unless one is chosen, the page takes the browser's and does not store it.
import { app } from "../../scripts/app.js"
import { api } from "../../scripts/api.js"

app.registerExtension({
  name: "OneDiffGuard.Language",
  async setup() {
    const language = app.extensionManager?.setting?.get("Comfy.Locale")
    if (language) await api.storeSetting("OneDiffGuard.Language", language)
  },
})

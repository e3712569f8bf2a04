// Tells the server which language the page is in: where nobody chose one, the page takes the browser's and keeps quiet.
import { app } from "../../scripts/app.js"
import { api } from "../../scripts/api.js"

app.registerExtension({
  name: "OneDiffGuard.Language",
  async setup() {
    const language = app.extensionManager?.setting?.get("Comfy.Locale")
    if (language) await api.storeSetting("OneDiffGuard.Language", language)
  },
})

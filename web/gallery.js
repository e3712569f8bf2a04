// Sorts this pack's templates by name, and so by model: the server lists them in the file system's order.
import { api } from "../../scripts/api.js"

const PACK = decodeURIComponent(new URL(import.meta.url).pathname.split("/").at(-2)) // its folder in custom_nodes
const listed = api.getWorkflowTemplates

if (listed)
  api.getWorkflowTemplates = async function () {
    const templates = await listed.call(this)
    templates?.[PACK]?.sort()
    return templates
  }

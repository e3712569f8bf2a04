// The page's own words in the languages of the pack. Reports themselves are in English.
import { app } from "../../scripts/app.js"

const WORDS = {
  en: {
    half: "half precision",
    fp32: "fp32",
    rerun: "rerun in fp32",
    cached: "cached",
    failed: "NOT FINITE",
    step: "step {}",
    open: "Full report",
    close: "Close the report",
    black: "A result of this run came out {}. Run it again with the NaN Guard? It computes what overflowed in fp32.",
    nonFinite: "with NaN or infinite values",
    allBlack: "black",
    runAgain: "Guard and run again",
    notNow: "Not now",
    gone: "ComfyUI's history does not have this run any more. Run the workflow again.",
  },
  zh: {
    half: "半精度",
    fp32: "fp32",
    rerun: "以 fp32 重算",
    cached: "缓存",
    failed: "非有限值",
    step: "第 {} 步",
    open: "完整报告",
    close: "收起报告",
    black: "这次运行的结果{}。是否用 NaN 守护重新运行？溢出的部分会以 fp32 计算。",
    nonFinite: "含有 NaN 或无穷大的值",
    allBlack: "全黑",
    runAgain: "守护并重新运行",
    notNow: "暂不",
    gone: "ComfyUI 的历史记录中已没有这次运行。请重新运行工作流。",
  },
  ru: {
    half: "половинная точность",
    fp32: "fp32",
    rerun: "пересчитано в fp32",
    cached: "из кэша",
    failed: "НЕ КОНЕЧНО",
    step: "шаг {}",
    open: "Полный отчёт",
    close: "Свернуть отчёт",
    black: "Результат этого запуска получился {}. Запустить снова с NaN Guard? То, что переполнилось, будет вычислено в fp32.",
    nonFinite: "со значениями NaN или бесконечностью",
    allBlack: "чёрным",
    runAgain: "Защитить и запустить снова",
    notNow: "Не сейчас",
    gone: "В истории ComfyUI этого запуска больше нет. Запустите рабочий процесс снова.",
  },
}

/** @returns {Record<string, string>} those of the page's language, else English ones */
export function words() {
  const locale = app.extensionManager?.setting?.get("Comfy.Locale") ?? "en"
  return WORDS[String(locale).split("-")[0]] ?? WORDS.en
}

// The strip's own words in the languages of the pack. Reports themselves are in English.
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
  },
}

/** @returns {Record<string, string>} those of the page's language, else English ones */
export function words() {
  const locale = app.extensionManager?.setting?.get("Comfy.Locale") ?? "en"
  return WORDS[String(locale).split("-")[0]] ?? WORDS.en
}

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
    rescued: "Rescued: what overflowed was computed again in fp32. The result can be used.",
    unguarded: "Not guarded to the end. Check this result.",
    broken: "Not rescued: some values are NaN, infinite or clipped. Do not use this result.",
    black: "A result of this run came out {}. Run it again with the NaN Guard? It computes what overflowed in fp32.",
    manyBlack: "{} runs came out black, or with NaN or infinite values. Run them again with the NaN Guard? It computes what overflowed in fp32.",
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
    rescued: "已挽救：溢出的部分已以 fp32 重新计算，结果可以使用。",
    unguarded: "未能全程守护，请检查这个结果。",
    broken: "未能挽救：仍有 NaN、无穷大或被截断的值，请勿使用这个结果。",
    manyBlack: "有 {} 次运行的结果全黑，或含有 NaN 或无穷大的值。是否用 NaN 守护重新运行？溢出的部分会以 fp32 计算。",
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
    rescued: "Спасено: то, что переполнилось, пересчитано в fp32. Результат можно использовать.",
    unguarded: "Защищено не до конца. Проверьте этот результат.",
    broken: "Не спасено: остались NaN, бесконечности или обрезанные значения. Не используйте этот результат.",
    manyBlack: "Запусков, которые получились чёрными, с NaN или бесконечностью: {}. Запустить их снова с NaN Guard? То, что переполнилось, будет вычислено в fp32.",
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

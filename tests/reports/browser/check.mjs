// A report in a real browser: axe's findings, what overflows, what it loads; screenshots and a PDF to look at.
//
//     node check.mjs REPORT.html OUT [light-390]
//
// Wide and narrow, light and dark, and printed; or one of them. Exit code 1: a serious finding, 0: none, or no browser here
// (it says so).
import { execFileSync } from "node:child_process";
import { mkdirSync } from "node:fs";
import { createRequire } from "node:module";
import { resolve } from "node:path";
import { pathToFileURL } from "node:url";
import puppeteer from "puppeteer-core";

const WIDTHS = [1280, 390];
const SCHEMES = ["light", "dark"];
const PATIENCE = 600_000; // ms: a busy machine takes its time
const SERIOUS = ["serious", "critical"];
const axe = createRequire(import.meta.url).resolve("axe-core/axe.min.js");

function browserPath() {
  if (process.env.CHROMIUM) return process.env.CHROMIUM;
  for (const name of ["chromium", "chromium-browser", "google-chrome", "chrome"]) {
    try {
      return execFileSync("which", [name], { encoding: "utf8" }).trim();
    } catch {
      continue;
    }
  }
  return null;
}

async function findings(page) {
  const { violations } = await page.evaluate(() => window.axe.run(document, { resultTypes: ["violations"] }));
  return violations.map((v) => ({
    impact: v.impact,
    text: `${v.impact}: ${v.id}: ${v.help} (${v.nodes.length}): ${v.nodes[0].html.slice(0, 160)} ${v.nodes[0].any[0]?.message ?? ""}`,
  }));
}

async function overflowing(page) {
  const [content, width] = await page.evaluate(() => [document.documentElement.scrollWidth, window.innerWidth]);
  return content > width ? [{ impact: "serious", text: `the page is ${content} px wide in a window of ${width}` }] : [];
}

async function shoot(page, out, prefix) {
  const top = await page.$("nav");
  const box = await top.boundingBox();
  const { width } = page.viewport();
  await page.screenshot({ path: `${out}/${prefix}-first-screen.png` });
  await page.screenshot({ path: `${out}/${prefix}-head.png`, clip: { x: 0, y: 0, width, height: box.y + box.height + 40 } });
  for (const section of await page.$$("section")) {
    const name = await section.$eval("h2", (h) => h.id);
    await section.screenshot({ path: `${out}/${prefix}-${name}.png` });
  }
}

async function look(browser, url, out) {
  const all = [];
  for (const scheme of SCHEMES) {
    for (const width of WIDTHS) {
      if (only && only !== `${scheme}-${width}`) continue;
      const page = await browser.newPage();
      page.setDefaultTimeout(PATIENCE);
      await page.setBypassCSP(true); // for axe; the policy itself forbids every script
      page.on("request", (r) => r.url() !== url && all.push({ impact: "serious", text: `the page loads ${r.url()}` }));
      await page.emulateMediaFeatures([{ name: "prefers-color-scheme", value: scheme }]);
      await page.setViewport({ width, height: width < 600 ? 844 : 800, deviceScaleFactor: 1 });
      await page.goto(url);
      await shoot(page, out, `${scheme}-${width}`);
      const overflow = await overflowing(page);
      await page.addScriptTag({ path: axe });
      const found = [...overflow, ...(await findings(page))];
      console.log(`${scheme}, ${width} px: ${found.length} findings`);
      for (const { text } of found) console.log(`  ${text}`);
      all.push(...found);
      if (scheme === "dark" && width === WIDTHS[0]) await page.pdf({ path: `${out}/print.pdf`, preferCSSPageSize: true });
      await page.close();
    }
  }
  return all;
}

const [report, out, only] = process.argv.slice(2);
const path = browserPath();
if (!path) {
  console.log("skipped: no Chromium here (install it, or name it in CHROMIUM)");
  process.exit(0);
}
mkdirSync(out, { recursive: true });
const browser = await puppeteer.launch({ executablePath: path, args: ["--no-sandbox", "--disable-gpu"], timeout: PATIENCE, protocolTimeout: PATIENCE });
try {
  const all = await look(browser, pathToFileURL(resolve(report)).href, resolve(out));
  const serious = all.filter(({ impact }) => SERIOUS.includes(impact));
  console.log(`${all.length} findings, ${serious.length} serious; pictures in ${out}`);
  process.exitCode = serious.length ? 1 : 0;
} finally {
  await browser.close();
}

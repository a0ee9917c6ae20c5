// Opens pages in a headless browser, and prints as JSON what it has seen: node browse.mjs FOLDER BASE PAGE...
//
// FOLDER is where npm has installed what package.json lists; another browser can be named by CHROMIUM.

import { createRequire } from "node:module";

const [folder, base, ...pages] = process.argv.slice(2);
const require = createRequire(`${folder}/package.json`);
const puppeteer = require("puppeteer-core");
const chromium = require("@sparticuz/chromium");
const executablePath = process.env.CHROMIUM ?? (await (chromium.default ?? chromium).executablePath());
const browser = await puppeteer.launch({ executablePath, headless: "shell", args: ["--no-sandbox", "--disable-gpu"] });
const seen = { pages: {}, search: [] };

// A page of the site, and what goes wrong in it.
async function open(path, scheme, width, address = base) {
  const page = await (await browser.createBrowserContext()).newPage(); // one that has chosen nothing yet
  const errors = [];
  page.on("console", (said) => said.type() === "error" && errors.push(`console: ${said.text()}`));
  page.on("pageerror", (error) => errors.push(`script: ${error.message}`));
  page.on("requestfailed", (request) => errors.push(`failed: ${request.url()}`));
  page.on("response", (response) => response.status() >= 400 && errors.push(`${response.status()}: ${response.url()}`));
  page.on("request", (request) => {
    if (!/^(data|about|blob):/.test(request.url()) && !request.url().startsWith(address)) errors.push(`elsewhere: ${request.url()}`);
  });
  await page.emulateMediaFeatures([{ name: "prefers-color-scheme", value: scheme }]);
  await page.setViewport({ width, height: 900 });
  await page.goto(`${address}/${path}`, { waitUntil: "networkidle0" });
  return [page, errors];
}

function look() {
  const light = (colour) => colour.match(/[\d.]+/g).slice(0, 3).reduce((sum, part) => sum + Number(part), 0) / 3;
  const article = document.querySelector("article");
  return {
    heading: document.querySelector("article h1")?.textContent ?? "",
    text: article?.innerText ?? "",
    images: [...document.images].filter((image) => !image.complete || !image.naturalWidth).map((image) => image.src),
    cut: [...document.querySelectorAll("article pre > code")].filter((code) => code.scrollWidth > code.clientWidth).length,
    width: Math.max(document.documentElement.scrollWidth, document.body.scrollWidth),
    background: light(getComputedStyle(document.body).backgroundColor),
    ink: light(getComputedStyle(article ?? document.body).color),
  };
}

async function visit(path) {
  const found = (seen.pages[path] = {});
  for (const [scheme, width] of [["light", 1200], ["dark", 390]]) {
    const [page, errors] = await open(path, scheme, width);
    await page.evaluate(async () => { for (const image of document.images) await image.decode().catch(() => {}); });
    found[scheme] = { errors, ...(await page.evaluate(look)) };
    if (process.env.SCREENSHOTS) await page.screenshot({ path: `${process.env.SCREENSHOTS}/${path.replaceAll("/", "_")}-${scheme}.png` });
    await page.browserContext().close();
  }
}

const left = [...new Set(pages)];
await Promise.all(
  Array.from({ length: 4 }, async () => {
    while (left.length) await visit(left.shift());
  }),
);

seen.search = {};
seen.errors = {};
for (const [opened, address] of [["served", base], ["as files", `file://${process.env.SITE}`]]) {
  const [page, errors] = await open(pages[0], "light", 1200, address);
  await page.type("[data-md-component=search-query]", "weight");
  await page.waitForSelector(".md-search-result__item", { timeout: 10000 }).catch(() => errors.push("search finds nothing"));
  seen.search[opened] = await page.$$eval(".md-search-result__item", (items) => items.map((item) => item.textContent));
  seen.errors[opened] = errors;
}

seen.moved = [];
for (const old of ["failures.html", "failures.html#timeout"]) {
  const [page] = await open(old, "light", 1200);
  seen.moved.push(page.url().slice(base.length + 1));
}
await browser.close();
console.log(JSON.stringify(seen));

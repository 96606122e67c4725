// node firefox.mjs MODULES FIREFOX URL TOKEN RANK: signs in, opens the worst job and its latest round with the keyboard
// alone, in Firefox over WebDriver BiDi. Prints one line of JSON.
const [modules, firefox, url, token, rank] = process.argv.slice(2)
const { default: puppeteer } = await import(`file://${modules}/puppeteer-core/lib/puppeteer/puppeteer-core.js`)

const browser = await puppeteer.launch({ browser: 'firefox', executablePath: firefox, headless: true, protocol: 'webDriverBiDi' })
const page = await browser.newPage()
const errors = []
page.on('console', message => { if (message.type() === 'error') errors.push(message.text()) })
page.on('pageerror', error => errors.push(error.message))
page.setDefaultTimeout(120_000)

const focused = read => page.evaluate(`(() => { const e = document.activeElement; return ${read} })()`)
async function tabUntil(read, wanted) {
  for (let i = 0; i < 60; i++) {
    await page.keyboard.press('Tab')
    if (String(await focused(read)).includes(wanted)) return
  }
  throw new Error(`the keyboard does not reach ${wanted}`)
}

try {
  await page.goto(url)
  await page.waitForSelector('#token')
  await page.focus('#token')
  await page.keyboard.type(token)
  await page.keyboard.press('Enter')
  await page.waitForSelector('tr.row')
  const first = await page.$eval('tr.row', row => row.innerText)
  await tabUntil('e.getAttribute("href") ?? ""', 'job=')
  await page.keyboard.press('Enter')
  await page.waitForSelector('canvas.map[data-painted]')
  await tabUntil('e.className', 'map')
  for (let i = 0; i < 12; i++) await page.keyboard.press('ArrowLeft')
  await page.keyboard.press('Enter')
  await page.waitForSelector('section[aria-label=Round] svg')
  const round = await page.$eval('section[aria-label=Round] svg', svg => svg.getAttribute('aria-label'))
  console.log(JSON.stringify({ first, round, errors, isCulprit: round.includes(`rank ${rank}, `) }))
} finally {
  await browser.close()
}

// Numbers and times as text.
export const clock = (ms, zone) =>
  new Date(ms).toLocaleTimeString('en-GB', { hour12: false, timeZone: zone })

const day = (ms, zone) => new Date(ms).toLocaleDateString('en-CA', { timeZone: zone })

const isKnown = ms => ms != null && !Number.isNaN(ms)

/** A time in the reader's zone; with the date if it is not today. */
export const local = ms => (!isKnown(ms) ? '–' : `${day(ms) === day(Date.now()) ? '' : `${day(ms)} `}${clock(ms)}`)

export const utc = ms => (!isKnown(ms) ? '' : `${clock(ms, 'UTC')} UTC`)

/** A time in the reader's zone and in UTC. */
export const when = ms => (!isKnown(ms) ? '–' : `${local(ms)} (${utc(ms)})`)

export const num = (value, digits = 1) =>
  value == null || Number.isNaN(value) ? '–' : value.toLocaleString('en', { maximumFractionDigits: digits })

export const plural = (n, noun) => `${num(n, 0)} ${noun}${n === 1 ? '' : 's'}`

export const millis = ms => (ms == null ? '–' : ms >= 10_000 ? `${num(ms / 1000)} s` : `${num(ms)} ms`)

/** A range [low, high], or one number where both are equal. */
export const range = (pair, before = '') =>
  !pair ? '–' : pair[0] === pair[1] ? before + num(pair[0]) : `${before}${num(pair[0])} to ${before}${num(pair[1])}`

export const percent = share => `${num(share * 100, share < 0.1 ? 1 : 0)} %`

export function duration(ms) {
  const s = Math.max(0, Math.round(ms / 1000))
  if (s < 120) return `${s} s`
  if (s < 7200) return `${Math.round(s / 60)} min`
  return s < 172_800 ? `${Math.round(s / 3600)} h` : `${Math.round(s / 86_400)} days`
}

/** The end of a range [low, high] in words: GPU seconds as GPU hours from an hour on. */
export const gpuTime = pair =>
  !pair ? '–' : pair[1] < 3600 ? `${range(pair)} GPU s` : `${range(pair.map(seconds => seconds / 3600))} GPU h`

/** Evidence as text; its lists are bounded by the hub. */
export const plain = value =>
  Array.isArray(value)
    ? value.map(plain).join(', ')
    : value && typeof value === 'object'
      ? Object.entries(value).map(fact).join(', ')
      : typeof value === 'number' ? num(value) : String(value)

/** One entry of the evidence: 21 intervals, longest 294 ms, devices nvme0n1. */
function fact([name, value]) {
  const words = name.replaceAll('_', ' ')
  if (typeof value === 'number' && name.startsWith('n_')) return `${num(value, 0)} ${words.slice(2)}`
  if (typeof value === 'number' && name.endsWith('_ms')) return `${words.slice(0, -3)} ${millis(value)}`
  return `${words} ${plain(value)}`
}

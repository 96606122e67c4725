// Colours of the heat map. Lightness rises or falls steadily from code to code, so the order is visible without any
// colour vision. Cells without data are hatched (see heat.js).
const STOPS = {
  light: ['#f7f8fb', '#dce8f5', '#b9d3ea', '#f0b865', '#e2953f', '#c86a22', '#96391a', '#521310'],
  dark: ['#12161d', '#1c2b40', '#2a4566', '#3d6793', '#a8671c', '#dd8f2e', '#f6c265', '#fff3cf'],
}
const NO_DATA_COLOUR = { light: '#e9e9ec', dark: '#1e2126' }

export const NO_DATA = 255
export const SCALE = { first: 40, last: 190 } // codes: 0.6 ms to 0.4 s

const channels = hex => [1, 3, 5].map(at => parseInt(hex.slice(at, at + 2), 16))
const packed = ([r, g, b]) => 0xff000000 | (b << 16) | (g << 8) | r

/** The 256 colours of a theme as packed RGBA, by code. */
export function colours(theme) {
  const stops = STOPS[theme].map(channels)
  const last = stops.length - 1
  const table = new Uint32Array(256)
  for (let code = 0; code < NO_DATA; code++) {
    const at = Math.min(1, Math.max(0, (code - SCALE.first) / (SCALE.last - SCALE.first))) * last
    const low = Math.min(last - 1, Math.floor(at))
    table[code] = packed(stops[low].map((v, k) => Math.round(v + (stops[low + 1][k] - v) * (at - low))))
  }
  table[NO_DATA] = packed(channels(NO_DATA_COLOUR[theme]))
  return table
}

/** The duration in ms that a code stands for. */
export const codeMs = code => (code === NO_DATA ? NaN : 0.1 * 2 ** (code / 16))

// Draws cells on a canvas. Every pixel shows the maximum of its cells: plain scaling of 1,024 rows to 340 pixels would
// drop two of three rows, and with them the one slow rank.
import { NO_DATA } from './palette.js'

const HATCH = 0xff808080

/**
 * codes: Uint8Array (ranks x n). view: {r0, r1, b0, b1}, the visible rows and columns. order: row number -> rank index.
 * image: ImageData of the size of the canvas.
 */
export function paint(image, { codes, n }, view, table, order) {
  const { width, height } = image
  const pixels = new Uint32Array(image.data.buffer)
  const rows = view.r1 - view.r0
  const columns = view.b1 - view.b0
  const line = new Uint8Array(columns) // code + 1; 0 is no data
  const edges = Array.from({ length: width + 1 }, (_, x) => Math.floor((x * columns) / width))
  let before = -1
  let hasHatch = false
  for (let y = 0; y < height; y++) {
    const first = view.r0 + Math.floor((y * rows) / height)
    const end = Math.max(first + 1, view.r0 + Math.floor(((y + 1) * rows) / height))
    const at = y * width
    if (first === before && end === first + 1 && !hasHatch) {
      pixels.copyWithin(at, at - width, at) // zoomed in: the same rank again
      continue
    }
    before = first
    hasHatch = false
    poolRows(line, codes, n, view.b0, order, first, end)
    for (let x = 0; x < width; x++) {
      let most = 0
      const stop = Math.max(edges[x] + 1, edges[x + 1])
      for (let i = edges[x]; i < stop; i++) if (line[i] > most) most = line[i]
      if (most) pixels[at + x] = table[most - 1]
      else {
        hasHatch = true
        pixels[at + x] = ((x + y) & 7) < 1 ? HATCH : table[NO_DATA]
      }
    }
  }
}

function poolRows(line, codes, n, b0, order, first, end) {
  line.fill(0)
  for (let row = first; row < end; row++) {
    const base = order[row] * n + b0
    for (let i = 0; i < line.length; i++) {
      const code = codes[base + i]
      if (code !== NO_DATA && code >= line[i]) line[i] = code + 1
    }
  }
}

/** Splits the binary answer of the matrix endpoint: a JSON head, then lateness and wait. */
export function unframe(buffer) {
  const size = new DataView(buffer).getUint32(0, true)
  const head = JSON.parse(new TextDecoder().decode(new Uint8Array(buffer, 4, size)))
  const cells = head.ranks * head.n
  const late = new Uint8Array(buffer, 4 + size, cells)
  const wait = new Uint8Array(buffer, 4 + size + cells, cells)
  return { ...head, late, wait }
}

/** Mean code of each rank over the cells with data: Float32Array (ranks), 0 without data. */
export function meanCodes(codes, ranks, n) {
  const out = new Float32Array(ranks)
  for (let rank = 0; rank < ranks; rank++) {
    let sum = 0
    let known = 0
    for (let i = rank * n; i < (rank + 1) * n; i++)
      if (codes[i] !== NO_DATA) {
        sum += codes[i]
        known++
      }
    out[rank] = known ? sum / known : 0
  }
  return out
}

/** The cell that a pixel shows: of all cells that share the pixel, the cell with the largest code. */
export function cellAt({ codes, n }, view, order, fx, fy, width, height) {
  const [ra, rz] = cellsOf(fy, view.r0, view.r1, height)
  const [ba, bz] = cellsOf(fx, view.b0, view.b1, width)
  let best = { r: ra, b: ba }
  let top = -1
  // A pointer is less exact than a pixel: the rows next to it count if they are clearly later.
  for (let r = Math.max(view.r0, ra - 2); r < Math.min(view.r1, rz + 2); r++)
    for (let b = ba; b < bz; b++) {
      const code = codes[order[r] * n + b]
      const handicap = r < ra || r >= rz ? 16 : 0
      if (code !== NO_DATA && code > top + handicap) {
        top = code
        best = { r, b }
      }
    }
  return best
}

function cellsOf(fraction, begin, end, pixels) {
  const whole = Math.max(1, Math.floor(pixels))
  const pixel = Math.min(whole - 1, Math.max(0, Math.floor(fraction * whole)))
  const first = begin + Math.floor((pixel * (end - begin)) / whole)
  return [first, Math.max(first + 1, begin + Math.floor(((pixel + 1) * (end - begin)) / whole))]
}

/** Adds newer columns to a map, in place; the oldest columns leave on the left. */
export function append(map, more) {
  for (let k = 0; k < more.n; k++) {
    let at = Math.floor((more.from_ms + k * more.bucket_ms - map.from_ms) / map.bucket_ms)
    if (at < 0) continue
    if (at >= map.n) {
      shift(map, at - map.n + 1)
      at = map.n - 1
    }
    for (const name of ['late', 'wait'])
      for (let rank = 0; rank < map.ranks; rank++) {
        const code = more[name][rank * more.n + k]
        if (code !== NO_DATA) map[name][rank * map.n + at] = code
      }
    if (more.seq[k] >= 0) {
      map.seq[at] = more.seq[k]
      map.comm[at] = more.comm[k]
    }
  }
  map.comms = more.comms
}

function shift(map, by) {
  const n = map.n
  const keep = Math.max(0, n - by)
  for (const name of ['late', 'wait'])
    for (let rank = 0; rank < map.ranks; rank++) {
      const row = map[name].subarray(rank * n, (rank + 1) * n)
      row.copyWithin(0, n - keep)
      row.fill(NO_DATA, keep)
    }
  map.seq = [...map.seq.slice(n - keep), ...Array(n - keep).fill(-1)]
  map.comm = [...map.comm.slice(n - keep), ...Array(n - keep).fill(0)]
  map.from_ms += by * map.bucket_ms
}

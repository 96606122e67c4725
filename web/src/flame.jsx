// Stacks as a flame graph: outermost frame at the top, width by the time that the process was off the CPU.
import { num } from './format.js'
import { Scroll } from './parts.jsx'

const ROW = 20
const LETTER = 6.6
const MAX_DEPTH = 14

function tree(stacks) {
  const root = { name: '', ms: 0, children: new Map() }
  for (const { frames, ms } of stacks) {
    root.ms += ms
    let node = root
    for (const name of frames.slice(0, MAX_DEPTH)) {
      if (!node.children.has(name)) node.children.set(name, { name, ms: 0, children: new Map() })
      node = node.children.get(name)
      node.ms += ms
    }
  }
  return root
}

function* boxes(node, x, depth, total) {
  for (const child of [...node.children.values()].sort((a, b) => b.ms - a.ms)) {
    const width = (1000 * child.ms) / total
    if (width >= 2) {
      yield { ...child, x, width, depth }
      yield* boxes(child, x, depth + 1, total)
    }
    x += width
  }
}

/** A frame without the folders of its file: the title has the whole path. */
const short = frame => frame.replace(/^\S*\/(?=[^/\s]+:\d+ )/, '')

export function Flame({ stacks, rank }) {
  if (!stacks?.length) return null
  const root = tree(stacks)
  const drawn = [...boxes(root, 0, 0, root.ms)]
  const depth = 1 + Math.max(...drawn.map(box => box.depth))
  const top = stacks[0]
  return (
    <section class="card" aria-label="Code">
      <h2>Code of rank {rank} while it was off the CPU</h2>
      <p class="dim">{num(root.ms / 1000)} s on all of its traced threads; the width is the time, the innermost frame is at the bottom.</p>
      <Scroll name="Flame graph">
      <svg viewBox={`0 0 1000 ${depth * ROW}`} class="flame wide" role="img" aria-label={`Flame graph. Longest: ${top.frames.at(-1)}, ${num(top.ms)} ms, ${top.category}.`}>
        {drawn.map((box, at) => (
          <g key={at} transform={`translate(${box.x} ${box.depth * ROW})`}>
            <title>{`${box.name}: ${num(box.ms)} ms`}</title>
            <rect width={Math.max(1, box.width - 1)} height={ROW - 2} />
            {box.width > 40 && <text x="4" y="13">{short(box.name).slice(0, Math.floor((box.width - 8) / LETTER))}</text>}
          </g>
        ))}
      </svg>
      </Scroll>
    </section>
  )
}

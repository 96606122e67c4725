// Small parts that several views share.
import { useEffect, useRef } from 'preact/hooks'
import { local, num, percent, utc } from './format.js'
import { paint } from './heat.js'
import { NO_DATA, codeMs, colours } from './palette.js'
import { labels, theme } from './state.js'

const SIGNS = { healthy: '●', recovered: '●', ended: '○', straggler: '▲', device: '▲', link: '▲', process: '▲', latency: '▲', dead_server: '■', hang: '■', mismatch: '■', failure: '■', quiet: '○' }

/** A state is always a shape, a word and a colour. */
export const State = ({ of }) => (
  <span class={`state ${of}`}>
    <span aria-hidden="true">{SIGNS[of] ?? '◆'}</span> {of}
  </span>
)

/** Cells in one row: the worst lateness of a job over ten minutes. */
export function Strip({ codes }) {
  const canvas = useRef()
  useEffect(() => {
    if (!codes) return
    const context = canvas.current.getContext('2d', { alpha: false })
    const image = context.createImageData(canvas.current.width, canvas.current.height)
    const view = { r0: 0, r1: 1, b0: 0, b1: codes.length }
    paint(image, { codes: Uint8Array.from(codes), n: codes.length }, view, colours(theme.value), [0])
    context.putImageData(image, 0, 0)
  }, [codes, theme.value])
  if (!codes) return <span class="dim">no rounds</span>
  const latest = codes.findLast(code => code !== NO_DATA)
  const text = latest === undefined ? 'no rounds' : `latest ${num(codeMs(latest))} ms, worst ${num(codeMs(Math.max(...codes.filter(code => code !== NO_DATA))))} ms`
  return <canvas class="strip" ref={canvas} width="150" height="14" role="img" aria-label={`Worst lateness of 10 minutes: ${text}`} />
}

/** A time on two lines: in the reader's zone and in UTC. */
export const Moment = ({ ms }) => <>{local(ms)}<br /><span class="dim">{utc(ms)}</span></>

/** Why a job is unknown: each reason with the next step that would decide it. */
export function Reasons({ of }) {
  if (!of?.length) return null
  return (
    <div>
      <h3>Reasons, and how to get an answer</h3>
      <ul>{of.map(each => typeof each === 'string' ? <li key={each}>{each}</li> : <li key={each.reason}>{each.reason}{each.action && <><br /><b>Next:</b> {each.action}</>}</li>)}</ul>
    </div>
  )
}

/** A part that may be wider than its place: it scrolls by itself, also with the keyboard. */
export const Scroll = ({ name, children }) => (
  <div class="scroll" tabIndex={0} role="region" aria-label={name}>
    {children}
  </div>
)

export const nameOf = category => labels.value[category] ?? category.replaceAll('_', ' ')

/** Shares of time as a bar and a legend. */
export function Budget({ rows }) {
  if (!rows?.length) return <p class="dim">No time ledger was recorded.</p>
  const text = rows.map(row => `${row.label} ${percent(row.share)}`).join(', ')
  return (
    <>
      <div class="bar" role="img" aria-label={text}>
        {rows.map(row => (
          <i key={row.category} class={`c-${row.category}`} style={{ width: `${100 * row.share}%` }} />
        ))}
      </div>
      <ul class="legend">
        {rows.slice(0, 6).map(row => (
          <li key={row.category}>
            <i class={`c-${row.category}`} />
            {row.label} {percent(row.share)}
          </li>
        ))}
      </ul>
    </>
  )
}

/** The time ledger of a rank next to its peers, both on one scale. */
export function Ledger({ rows, rank, title, note }) {
  const sum = column => rows.reduce((total, row) => total + row[column], 0)
  const total = Math.max(sum('rank_ms'), sum('peers_ms')) || 1
  const bar = column => (
    <div class="bar" role="img" aria-label={rows.filter(row => row[column] > 0).map(row => `${nameOf(row.category)} ${num(row[column])} ms`).join(', ') || 'no time'}>
      {rows.filter(row => row[column] > 0).map(row => (
        <i key={row.category} class={`c-${row.category}`} title={`${nameOf(row.category)} ${num(row[column])} ms`} style={{ width: `${(100 * row[column]) / total}%` }} />
      ))}
    </div>
  )
  const legend = rows.filter(row => Math.max(row.rank_ms, row.peers_ms) > 0.05).slice(0, 6)
  return (
    <div class="ledger-block">
      <h3>{title}</h3>
      {note && <p class="dim">{note}</p>}
      <div class="ledger">
        <b>rank {rank}</b>
        {bar('rank_ms')}
        <span class="num">{num(sum('rank_ms'))} ms</span>
        <span class="dim">peers (median)</span>
        {bar('peers_ms')}
        <span class="num">{num(sum('peers_ms'))} ms</span>
      </div>
      <ul class="legend">
        {legend.map(row => (
          <li key={row.category}>
            <i class={`c-${row.category}`} />
            {nameOf(row.category)} {row.excess_ms > 0 ? <b>+{num(row.excess_ms)} ms</b> : `${num(row.excess_ms)} ms`}
          </li>
        ))}
      </ul>
    </div>
  )
}

// One round on all ranks: arrivals and waits, the last arrivals first.
import { get, page } from './api.js'
import { num, plural, when } from './format.js'
import { Scroll } from './parts.jsx'
import { inPage, jobKey, linkTo, query, round, snapshot } from './state.js'

const FIRST = 8
const LAST = 4
const ROW = 18
const LEFT = 90
const WIDTH = 850

export async function loadRound(key, comm, seq, at) {
  const answer = await get(page('round', { job: key, comm, seq, ...(at && { at }) }))
  if (key === jobKey.value && String(answer.seq) === query.value.get('seq')) round.value = answer
}

const median = sorted => sorted[(sorted.length - 1) >> 1]

export function Round() {
  const r = round.value
  if (!r) return null
  const known = r.arrival_us.filter(us => us != null).sort((a, b) => a - b)
  const middle = median(known)
  const last = known.at(-1)
  const byArrival = r.ranks.map((_, i) => i).sort((a, b) => (r.arrival_us[b] ?? Infinity) - (r.arrival_us[a] ?? Infinity) || a - b)
  const drawn = byArrival.length > FIRST + LAST + 2 ? [...byArrival.slice(0, FIRST), ...byArrival.slice(-LAST)] : byArrival
  const begin = known[0] - 500
  const end = last + Math.max(2000, (last - middle) * 0.15)
  const x = us => LEFT + (WIDTH * (us - begin)) / (end - begin)
  const t0 = Number(BigInt(r.t0_ns) / 1_000_000n)
  const sql = `SELECT rank, ts, wait_leave_ns - wait_enter_ns AS wait_ns\nFROM collectives\nWHERE comm_hash = '${r.comm}' AND seq = ${r.seq}\nORDER BY ts_ns DESC`
  const lateBy = i => (r.arrival_us[i] - middle) / 1000
  return (
    <section class="card" aria-label="Round">
      <div class="tools">
        <h2>Round {r.seq} on {plural(r.ranks.length, 'rank')}</h2>
        <span class="dim">{r.op}, {when(t0)}. The last arrivals first{drawn.length < byArrival.length && `; the ${FIRST} last and the ${LAST} first are drawn`}.</span>
        {!snapshot && <a href={linkTo({ view: 'sql', sql })} onClick={inPage({ view: 'sql', sql })}>SQL of this round</a>}
      </div>
      {r.missing.n > 0 && <p class="hang"><b>{plural(r.missing.n, 'rank')} {r.missing.n === 1 ? 'has' : 'have'} not arrived:</b> {r.missing.first.join(', ')}{r.missing.n > r.missing.first.length && ` and ${num(r.missing.n - r.missing.first.length, 0)} more`}</p>}
      <Scroll name="Drawing of the round">
      <svg class="wide" viewBox={`0 0 1000 ${drawn.length * ROW + 22}`} role="img" aria-label={`Arrivals: the last is rank ${r.ranks[byArrival.find(i => r.arrival_us[i] != null)]}, ${num((last - middle) / 1000)} ms after the median`}>
        {drawn.map((i, y) => (
          <g key={i} transform={`translate(0 ${y * ROW})`}>
            <text x="0" y="13">rank {r.ranks[i]}</text>
            {r.arrival_us[i] == null ? <text x={LEFT} y="13" class="hang">has not arrived</text> : (
              <>
                <rect class="wait" x={x(r.arrival_us[i])} y="3" width={Math.max(0, x(last) - x(r.arrival_us[i]))} height="11" />
                <rect class="mark" x={x(r.arrival_us[i]) - 2} y="1" width="4" height="15" />
                {(y < 3 || Math.abs(lateBy(i)) > 1) && <text x={Math.min(930, x(r.arrival_us[i]) + 7)} y="13">{`${lateBy(i) >= 0 ? '+' : ''}${num(lateBy(i), 2)} ms`}</text>}
              </>
            )}
          </g>
        ))}
        <text class="dim" x={LEFT} y={drawn.length * ROW + 14}>mark: arrival; bar: wait for the last rank; number: lateness against the median arrival</text>
      </svg>
      </Scroll>
    </section>
  )
}

// The page: header and the view that the link selects.
import './style.css'
import { signal } from '@preact/signals'
import { render } from 'preact'
import { page, post, request, save, shown } from './api.js'
import { Compare } from './compare.jsx'
import { Job } from './job.jsx'
import { Jobs } from './jobs.jsx'
import { start } from './live.js'
import { Servers } from './servers.jsx'
import { SignIn } from './sign_in.jsx'
import { Sql } from './sql.jsx'
import * as state from './state.js'

const DAY_S = 86_400
const note = signal('')

function windowOfMap() {
  const map = state.map.value
  const from = Math.round(map.from_ms)
  return { from, to: Math.round(map.from_ms + map.n * map.bucket_ms) }
}

async function copy(text, name) {
  try {
    await navigator.clipboard.writeText(text)
    note.value = `${name} copied`
  } catch {
    note.value = text // no permission, or no TLS: the reader copies it
  }
}

const copyLink = () => copy(`${location.origin}/ui?${new URLSearchParams({ ...Object.fromEntries(state.query.value), ...windowOfMap() })}`, 'Link')

const share = () =>
  shown(async () => {
    const { path } = await post('/api/v1/page/share', { job: state.jobKey.value, expires_s: 7 * DAY_S })
    await copy(location.origin + path, 'Share link, valid for 7 days,')
  })

const saveSnapshot = () =>
  shown(async () => {
    const q = state.query.value
    const extra = Object.fromEntries(['rank', 'seq', 'comm', 'metric', 'order', 'at'].filter(name => q.get(name)).map(name => [name, q.get(name)]))
    const parameters = { job: state.jobKey.value, ...windowOfMap(), n: state.map.value.n, ...extra }
    await save(await request(page('snapshot', parameters)), 'stallscope.html')
    note.value = 'Snapshot saved. It contains host names.'
  })

const signOut = () =>
  shown(async () => {
    await request('/logout', {})
    state.about.value = { ...state.about.value, user: null }
  })

const togglePause = () => {
  state.isPaused.value = !state.isPaused.value
}
const toggleTheme = () => {
  state.theme.value = state.theme.value === 'dark' ? 'light' : 'dark'
}

function LiveMark() {
  if (state.snapshot) return <span class="dim">Snapshot of {new Date(state.snapshot.made_ms).toISOString()}, read only</span>
  if (!state.user.value) return null
  const { trace, is_live: isLive } = state.health.value ?? {}
  if (trace && !isLive) return <span class="dim">■ recording, ended</span>
  if (state.isPaused.value) return <span class="dim">❚❚ paused</span>
  if (!state.isConnected.value) return <span class="inconclusive" role="status">◆ no connection to the hub; retrying</span>
  return <span class="dim"><span class="live" aria-hidden="true">●</span> live</span>
}

function Header() {
  const isShare = !!state.user.value?.job
  const hasMap = !!state.map.value && state.jobKey.value
  const isOver = state.health.value?.trace && !state.health.value.is_live
  return (
    <header>
      <b>stallscope</b>
      <LiveMark />
      {state.problem.value && <span role="alert" class="straggler">{state.problem.value}</span>}
      {note.value && <span role="status" class="note">{note.value} <button class="small" onClick={() => { note.value = '' }} aria-label="Close the note">×</button></span>}
      <nav class="right" aria-label="Page">
        {state.user.value && (
          <>
            {!isShare && !state.health.value?.trace && <a href="?view=servers" onClick={state.inPage({ view: 'servers' })}>Servers</a>}
            {!isShare && <a href="?view=sql" onClick={state.inPage({ view: 'sql' })}>SQL</a>}
            {!isShare && <a href="?view=compare" onClick={state.inPage({ view: 'compare', ...(state.jobKey.value && { a: state.jobKey.value, b: state.jobKey.value }) })}>Compare</a>}
            {!isOver && <button aria-pressed={state.isPaused.value} onClick={togglePause}>{state.isPaused.value ? 'Resume' : 'Pause'}</button>}
            {hasMap && <button onClick={copyLink}>Copy link</button>}
            {hasMap && !isShare && !state.health.value?.trace && <button class="opt" onClick={share}>Share</button>}
            {hasMap && <button class="opt" onClick={saveSnapshot} title="One HTML file for a ticket; it contains host names">Save snapshot</button>}
            <button class="opt" onClick={signOut}>Sign out</button>
          </>
        )}
        <button onClick={toggleTheme}>{state.theme.value === 'dark' ? 'Light' : 'Dark'}</button>
      </nav>
    </header>
  )
}

function View() {
  if (state.snapshot) return <Job />
  if (!state.about.value) return <main><p class="dim" role="status">Loading</p></main>
  if (!state.user.value) return <SignIn />
  if (state.jobKey.value) return <Job key={state.jobKey.value} />
  if (state.user.value.job) return <main><h1>Shared job</h1><a href={state.linkTo({ job: state.user.value.job })}>Open the job</a></main>
  const view = state.query.value.get('view')
  return view === 'sql' ? <Sql /> : view === 'compare' ? <Compare /> : view === 'servers' ? <Servers /> : <Jobs />
}

const App = () => (
  <>
    <Header />
    <View />
  </>
)

render(<App />, document.getElementById('app'))
start()

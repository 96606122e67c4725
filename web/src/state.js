// The state of the page as signals: the link, the session, the jobs, the data of the open view.
import { computed, effect, signal } from '@preact/signals'

const snapshotElement = document.getElementById('snapshot')
/** The data of a snapshot file; null where a hub serves the page. */
export const snapshot = snapshotElement && JSON.parse(snapshotElement.textContent)

export const query = signal(new URLSearchParams(snapshot ? snapshot.query : location.search))
export const about = signal(null) // {sign_in, user, labels, version}
export const user = computed(() => about.value?.user ?? null)
export const labels = computed(() => snapshot?.labels ?? about.value?.labels ?? {})
export const rows = signal(snapshot ? snapshot.rows : null)
export const incidents = signal([])
export const health = signal(null)
export const problem = signal('')
export const isPaused = signal(!!snapshot)
export const isConnected = signal(true)
export const theme = signal(matchMedia('(prefers-color-scheme: dark)').matches ? 'dark' : 'light')

export const jobKey = computed(() => query.value.get('job'))
export const job = computed(() => rows.value?.find(row => row.job === jobKey.value || resolves(row)) ?? null)
const resolves = row => overview.value?.job?.job === row.job && overview.value.key === jobKey.value

export const overview = signal(snapshot ? { ...snapshot.overview, key: new URLSearchParams(snapshot.query).get('job') } : null)
export const evidence = signal(snapshot?.evidence ?? null)
export const round = signal(snapshot?.round ?? null)
export const map = signal(null)
export const mapVersion = signal(0)

matchMedia('(prefers-color-scheme: dark)').addEventListener('change', event => {
  theme.value = event.matches ? 'dark' : 'light'
})
effect(() => {
  document.documentElement.dataset.theme = theme.value
})
addEventListener('popstate', () => {
  query.value = new URLSearchParams(location.search)
})

/** Changes the link: null removes a parameter. isReplaced: without a new entry in the history. */
export function go(changes, isReplaced = false) {
  const next = new URLSearchParams(query.value)
  for (const [name, value] of Object.entries(changes))
    if (value == null) next.delete(name)
    else next.set(name, value)
  const text = next.size ? `?${next}` : location.pathname
  if (!snapshot) history[isReplaced ? 'replaceState' : 'pushState'](null, '', text)
  query.value = next
}

/** The link of another view. */
export const linkTo = parameters => `?${new URLSearchParams(parameters)}`

/** Opens a link inside the page; other clicks (new tab) stay with the browser. */
export const inPage = parameters => event => {
  if (event.metaKey || event.ctrlKey || event.shiftKey || event.button) return
  event.preventDefault()
  const text = linkTo(parameters)
  if (!snapshot) history.pushState(null, '', text === '?' ? location.pathname : text)
  query.value = new URLSearchParams(parameters)
  scrollTo(0, 0)
}

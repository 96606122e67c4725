// Requests to the hub. An error of the hub becomes an Error with its message.
import { about, problem } from './state.js'

export async function request(path, body, method = body === undefined ? 'GET' : 'POST') {
  const options = method === 'GET' ? {} : { method, headers: { 'content-type': 'application/json' }, body: body && JSON.stringify(body) }
  let answer
  try {
    answer = await fetch(path, options)
  } catch {
    throw new Error('The hub does not answer. The page will retry.')
  }
  if (answer.ok) return answer
  if (answer.status === 401 && about.value) about.value = { ...about.value, user: null }
  throw new Error((await answer.json().catch(() => null))?.error?.message ?? `The hub answered ${answer.status}.`)
}

export const get = async path => (await request(path)).json()
export const post = async (path, body) => (await request(path, body)).json()

export const page = (name, parameters) => `/api/v1/page/${name}?${new URLSearchParams(parameters)}`

/** Runs a request and shows its error in the header. */
export async function shown(work) {
  try {
    const value = await work()
    problem.value = ''
    return value
  } catch (error) {
    problem.value = error.message
    return null
  }
}

/** Saves a response as a file. */
export async function save(answer, name) {
  const url = URL.createObjectURL(await answer.blob())
  const link = document.createElement('a')
  link.href = url
  link.download = name
  link.click()
  setTimeout(() => URL.revokeObjectURL(url), 10_000)
}

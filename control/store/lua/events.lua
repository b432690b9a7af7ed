-- Part of commit.lua and publish.lua: appending to a session's events.
-- A mark is `n bytes now_id before_id`: how many events this life has had, the bytes since now_id was set, and two
-- positions. Every half of the allowed bytes the stream is cut at the older position, so it holds at most the
-- allowed bytes and, once it has been that full, at least half of them.
local ENTRY_BYTES = 48

local function read_mark(text)
  if not text then return {n = 0, bytes = 0, now_id = '0', before_id = '0'} end
  local n, bytes, now_id, before_id = string.match(text, '^(%d+) (%d+) (%S+) (%S+)$')
  return {n = tonumber(n), bytes = tonumber(bytes), now_id = now_id, before_id = before_id}
end

local function write_mark(mark)
  return string.format('%d %d %s %s', mark.n, mark.bytes, mark.now_id, mark.before_id)
end

local function append_event(key, mark, kind, body, half_bytes)
  mark.n = mark.n + 1
  local id = redis.call('XADD', key, '*', 't', kind, 'n', mark.n, 'b', body)
  mark.bytes = mark.bytes + #body + ENTRY_BYTES
  if mark.bytes > half_bytes then
    if mark.before_id ~= '0' then redis.call('XTRIM', key, 'MINID', mark.before_id) end
    mark.before_id = mark.now_id ~= '0' and mark.now_id or id
    mark.now_id = id
    mark.bytes = 0
  end
end

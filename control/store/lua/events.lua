-- Part of commit.lua and publish.lua: appending to a session's events.
-- A mark is `n bytes since_id`: how many events this life has had, and the bytes from the event since_id on. Before they
-- would pass half of the allowed bytes, the stream is cut at since_id and a new half begins. So it holds at most the
-- allowed bytes and, once it has been that full, about half of them; only events bigger than a half can make it more.
local ENTRY_BYTES = 48

local function read_mark(text)
  local n, bytes, since_id = string.match(text or '', '^(%d+) (%d+) (%S+)$')
  if not n then return {n = 0, bytes = 0, since_id = '0'} end
  return {n = tonumber(n), bytes = tonumber(bytes), since_id = since_id}
end

local function write_mark(mark)
  return string.format('%.0f %.0f %s', mark.n, mark.bytes, mark.since_id)
end

local function append_event(key, mark, kind, body, half_bytes)
  local id = redis.call('XADD', key, '*', 't', kind, 'n', mark.n + 1, 'b', body)
  mark.n = mark.n + 1
  local bytes = mark.bytes + #body + ENTRY_BYTES
  if bytes > half_bytes and mark.bytes > 0 then
    if mark.since_id ~= '0' then redis.call('XTRIM', key, 'MINID', mark.since_id) end
    mark.since_id = id
    bytes = #body + ENTRY_BYTES
  end
  mark.bytes = bytes
end

#!lua flags=allow-oom
-- A stage worker's word to the owner, and the end of the queue entries that it is about, in one step.
--
-- KEYS   1 acks, 2 fenced, 3 the queue
-- ARGV   1 worker id, 2 number of acks, the acks, then the ids of the queue's entries that are done with
-- returns 1, or 0 if this life of the worker is over: then nothing was written (S40)
if redis.call('SISMEMBER', KEYS[2], ARGV[1]) == 1 then return 0 end
local count = tonumber(ARGV[2])
for i = 3, 2 + count do redis.call('XADD', KEYS[1], '*', 'b', ARGV[i]) end
if #ARGV > 2 + count then redis.call('XDEL', KEYS[3], unpack(ARGV, 3 + count)) end
return 1

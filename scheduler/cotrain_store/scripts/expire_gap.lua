-- expire_gap: fail the ops that wait behind a seq that never came. The gap itself stays a gap:
-- nothing is skipped, and should the missing op come, it runs and these keep their failure. What
-- arrives behind it later is as late as they were.
local epoch_key, gaps, log, notify = KEYS[1], KEYS[2], KEYS[3], KEYS[8]
local of_run = { ops = KEYS[4], bodies = KEYS[5], refs = KEYS[6], queue = KEYS[7] }
local epoch, run, missing = ARGV[1], ARGV[2], tonumber(ARGV[3])
local failure = { ttl = ARGV[4], result = ARGV[5], body = ARGV[6], envelope = ARGV[7] }

if redis.call('GET', epoch_key) ~= epoch then
  return 'FENCED'
end
local row = redis.call('HMGET', log, 'next', 'last')
local since = redis.call('ZSCORE', gaps, run)
if tonumber(row[1]) ~= missing or redis.call('HEXISTS', of_run.ops, missing) == 1 or not since then
  return 'OK'
end
redis.call('ZREM', gaps, run)
local resolved, ops, bytes = {}, 0, 0
for seq = missing + 1, tonumber(row[2]) do
  reject(of_run, run, seq, failure, resolved)
  local size = string.match(redis.call('HGET', of_run.ops, seq) or '', '^[^|]*|%d+|(%d+)')
  if size then
    ops, bytes = ops + 1, bytes + tonumber(size)
  end
end
give_up_ops(log, of_run.queue, ops, bytes, since)
redis.call('PUBLISH', notify, table.concat(resolved, '\n'))
return 'OK'

-- expire_gap: fail the ops that wait behind a seq that never came. The gap itself stays a gap:
-- nothing is skipped, and should the missing op come, it runs and these keep their failure.
local epoch_key, gaps, log, notify = KEYS[1], KEYS[2], KEYS[3], KEYS[8]
local of_run = { ops = KEYS[4], bodies = KEYS[5], refs = KEYS[6], queue = KEYS[7] }
local epoch, run = ARGV[1], ARGV[2]
local failure = { ttl = ARGV[3], result = ARGV[4], body = ARGV[5], envelope = ARGV[6] }

if redis.call('GET', epoch_key) ~= epoch then
  return 'FENCED'
end
local row = redis.call('HMGET', log, 'next', 'last')
local resolved = {}
redis.call('ZREM', gaps, run)
if redis.call('HEXISTS', of_run.ops, row[1]) == 1 then
  return 'OK'
end
for seq = tonumber(row[1]) + 1, tonumber(row[2]) do
  reject(of_run, run, seq, failure, resolved)
end
redis.call('PUBLISH', notify, table.concat(resolved, '\n'))
return 'OK'

-- roll_back: the newest state of a run is lost; go on from a file that holds an older one, as of `done`.
-- What is accepted and not committed was meant for the lost state: it fails. What comes later runs.
-- Fenced by the worker's epoch. Twice is harmless.
local epoch_key, log, record_key, open = KEYS[1], KEYS[2], KEYS[3], KEYS[4]
local of_run = { ops = KEYS[5], bodies = KEYS[6], digests = KEYS[7], refs = KEYS[8], queue = KEYS[9] }
local notify, counters = KEYS[10], KEYS[11]
local epoch, run, done, file, sha = ARGV[1], ARGV[2], tonumber(ARGV[3]), ARGV[4], ARGV[5]
local weights_epoch, path, digests_kept = tonumber(ARGV[6]), ARGV[7], tonumber(ARGV[8])
local failure = { ttl = ARGV[9], result = ARGV[10], body = ARGV[11], envelope = ARGV[12] }
local FIRST = 13 -- then, for each open step that holds ops of the run: cycle, the step, and it after this

if redis.call('GET', epoch_key) ~= epoch then
  return 'FENCED'
end
local row = redis.call('HMGET', log, 'done', 'last', 'snap', 'cut', 'epoch')
if tonumber(row[5] or 0) == weights_epoch then
  return 'OK'
end
if tonumber(row[1] or -1) ~= done or tonumber(row[5] or 0) ~= weights_epoch - 1 then
  return 'OUTDATED'
end
for i = FIRST, #ARGV, 3 do
  if redis.call('HGET', open, ARGV[i]) ~= ARGV[i + 1] then
    return 'OUTDATED'
  end
end

for i = FIRST, #ARGV, 3 do
  redis.call('HSET', open, ARGV[i], ARGV[i + 2])
end
local resolved = {}
for seq = done + 1, tonumber(row[2]) do
  reject(of_run, run, seq, failure, resolved)
end
cut_log(of_run, tonumber(row[4] or row[3]) + 1, done, digests_kept)
redis.call('HSET', log, 'snap', done, 'snapfile', file, 'snapsha', sha, 'cut', done,
  'oldsnap', done, 'oldfile', '', 'oldsha', '', 'epoch', weights_epoch, 'rolled_back_to', path)
redis.call('HDEL', log, 'numerics', 'oldnumerics')
redis.call('HSET', record_key, 'weights_epoch', weights_epoch, 'rolled_back_to', path)
redis.call('HINCRBY', counters, 'rollbacks', 1)
redis.call('PUBLISH', notify, table.concat(resolved, '\n'))
return 'OK'

-- snapshot: register a complete file as the run's new base and cut the log up to its seq.
-- Fenced by the worker's epoch; never past what is committed, never backwards, and never past a save
-- whose weights are not stored: the log is what makes them again.
local epoch_key, log, ops, bodies, digests, refs = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5], KEYS[6]
local epoch, seq, file, sha, digests_kept = ARGV[1], tonumber(ARGV[2]), ARGV[3], ARGV[4], tonumber(ARGV[5])
local run = ARGV[6]

if redis.call('GET', epoch_key) ~= epoch then
  return 'FENCED'
end
local row = redis.call('HMGET', log, 'snap', 'done', 'snapfile', 'snapsha')
local snap, done = tonumber(row[1] or -1), tonumber(row[2] or -1)
if not row[1] or seq <= snap or seq > done then
  return 'OUTDATED'
end
for cut = snap + 1, seq do
  if redis.call('HGET', 'cotrain:weights:' .. run .. ':' .. cut, 'digest') == '' then
    return 'UNSTORED'
  end
end
for cut = snap + 1, seq do
  local envelope = redis.call('HGET', ops, cut)
  -- Not greedy: the reference is the last of five fields and holds no '|'.
  local segment = envelope and string.match(envelope, '|spool:([^:|]+):[^|]*$')
  if segment and string.sub(envelope, 1, 8) ~= 'forward|' then -- a forward's body went at commit
    if redis.call('HINCRBY', refs, segment, -1) <= 0 then
      redis.call('HDEL', refs, segment)
    end
  end
  redis.call('HDEL', ops, cut)
  redis.call('HDEL', bodies, cut)
  local old = cut - digests_kept
  local key = redis.call('HGET', digests, 'rider:' .. old)
  redis.call('HDEL', digests, old)
  if key then
    redis.call('HDEL', digests, 'rider:' .. old, 'key:' .. key)
  end
end
redis.call('HSET', log, 'snap', seq, 'snapfile', file, 'snapsha', sha,
  'oldsnap', snap, 'oldfile', row[3] or '', 'oldsha', row[4] or '')
if seq == done then
  redis.call('HDEL', log, 'numerics') -- nothing is left to replay: the next commit says whose it is
end
return 'OK'

-- expire_gap: fail the ops that wait behind a seq that never came. The gap itself stays a gap:
-- nothing is skipped, and should the missing op come, it runs and these keep their failure.
local epoch_key, gaps, log, ops, bodies = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5]
local refs, queue, notify = KEYS[6], KEYS[7], KEYS[8]
local epoch, run, ttl, result, body, rejected = ARGV[1], ARGV[2], ARGV[3], ARGV[4], ARGV[5], ARGV[6]

if redis.call('GET', epoch_key) ~= epoch then
  return 'FENCED'
end
local row = redis.call('HMGET', log, 'next', 'last')
local resolved = {}
redis.call('ZREM', gaps, run)
if redis.call('HEXISTS', ops, row[1]) == 1 then
  return 'OK'
end
for seq = tonumber(row[1]) + 1, tonumber(row[2]) do
  local envelope = redis.call('HGET', ops, seq)
  local kind, tokens, size, ref = string.match(envelope or '', '^([^|]*)|(%d+)|(%d+)|[^|]*|(.*)$')
  if kind and kind ~= 'rejected' then
    local segment = string.match(ref, '^spool:([^:]+):')
    if segment and redis.call('HINCRBY', refs, segment, -1) <= 0 then
      redis.call('HDEL', refs, segment)
    end
    redis.call('HINCRBY', queue, 'tokens', 0 - tonumber(tokens))
    redis.call('HINCRBY', queue, 'bytes', #body - tonumber(size))
    redis.call('HSET', ops, seq, rejected)
    redis.call('HSET', bodies, seq, body)
    redis.call('SET', 'cotrain:result:' .. run .. ':' .. seq, result, 'NX', 'PX', ttl)
    resolved[#resolved + 1] = run .. ':' .. seq
  end
end
redis.call('PUBLISH', notify, table.concat(resolved, '\n'))
return 'OK'

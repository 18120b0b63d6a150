-- close: end a run, by its tenant (closed) or because it cannot go on (failed).
-- Ops not yet planned fail at once; planned ones still commit. Twice is harmless.
-- A worker that fails a run is fenced by its epoch: a replaced one sees a log that has moved on.
local record_key, log, ops, bodies, ready = KEYS[1], KEYS[2], KEYS[3], KEYS[4], KEYS[5]
local gaps, queue, tenant_runs, refs, notify = KEYS[6], KEYS[7], KEYS[8], KEYS[9], KEYS[10]
local run, prefix, ttl, request, result, failure = ARGV[1], ARGV[2], ARGV[3], ARGV[4], ARGV[5], ARGV[6]
local state, epoch_key, epoch = ARGV[7], KEYS[11], ARGV[8]

if epoch_key and redis.call('GET', epoch_key) ~= epoch then
  return 'FENCED'
end
local row = redis.call('HMGET', log, 'state', 'next', 'last', 'worker')
if not row[1] then
  return 'GONE'
end
local resolved = {}
if request ~= '' then
  redis.call('SET', 'cotrain:result:' .. request, result, 'PX', ttl)
  resolved[1] = request
end
if row[1] == 'live' or row[1] == 'failed' and state == 'closed' then
  redis.call('HSET', log, 'state', state)
  redis.call('HSET', record_key, 'state', state)
  redis.call('SREM', tenant_runs, run)
  redis.call('ZREM', ready, run)
  redis.call('ZREM', gaps, run)
  for seq = tonumber(row[2]), tonumber(row[3]) do
    local envelope = redis.call('HGET', ops, seq)
    if envelope then
      local tokens, size, ref = string.match(envelope, '^[^|]*|(%d+)|(%d+)|[^|]*|(.*)$')
      local segment = string.match(ref, '^spool:([^:]+):')
      if segment and redis.call('HINCRBY', refs, segment, -1) <= 0 then
        redis.call('HDEL', refs, segment)
      end
      redis.call('HDEL', ops, seq)
      redis.call('HDEL', bodies, seq)
      redis.call('HINCRBY', queue, 'ops', -1)
      redis.call('HINCRBY', queue, 'tokens', 0 - tonumber(tokens))
      redis.call('HINCRBY', queue, 'bytes', 0 - tonumber(size))
      redis.call('SET', 'cotrain:result:' .. run .. ':' .. seq, failure, 'NX', 'PX', ttl)
      resolved[#resolved + 1] = run .. ':' .. seq
    end
  end
  if row[4] and state == 'closed' then
    redis.call('SADD', prefix .. 'drops:' .. row[4], run)
    redis.call('PUBLISH', prefix .. 'notify:' .. row[4], run)
  end
end
redis.call('PUBLISH', notify, table.concat(resolved, '\n'))
return 'OK'

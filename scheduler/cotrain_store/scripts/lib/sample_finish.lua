-- sample_finish: end a sample request, once.
-- needs: ages, idle_tenant, spool_refs
-- Stores its result, publishes its completion to its client, and releases its place in the queue, its claim, quota and
-- body. Returns its tenant, or false if it had already ended.
-- A short record of the request (tenant and digest) outlives its result, for repeats and late polls.
--
-- `lives` holds, in ms, the extra lifetime of that record, and the time for which the completion is published.
local function finish(lives, request, result, ttl_ms, failed, size)
  local sample = 'cotrain:sample:' .. request
  local row = redis.call('HMGET', sample, 'state', 'tenant', 'sampler', 'clone', 'digest',
    'prefix', 'lane', 'holder', 'ref', 'size', 'tokens')
  local state, tenant, sampler, clone, digest = row[1], row[2], row[3], row[4], row[5]
  local prefix, queue, holder, ref, body_bytes = row[6], row[7], row[8], row[9], row[10]
  if not state or state == 'done' then
    return false
  end
  local load = prefix .. 'samples:' .. tenant
  if state == 'waiting' then
    redis.call('LREM', prefix .. 'waiting:' .. queue .. ':' .. tenant, 1, request)
    if redis.call('HINCRBY', load, 'waiting', -1) == 0 then
      redis.call('LREM', prefix .. 'sample_ring', 1, tenant)
    end
  else
    redis.call('LREM', prefix .. 'claimed:' .. holder, 1, request)
    redis.call('SREM', prefix .. 'cancelled:' .. holder, request)
    redis.call('HINCRBY', load, 'running', -1)
  end
  redis.call('HINCRBY', load, 'bytes', 0 - tonumber(body_bytes))
  redis.call('HINCRBY', load, 'tokens', 0 - tonumber(row[11] or 0))
  remove_if_idle(prefix, tenant)
  release_segment(string.match(ref, '^spool:([^:]+):'))
  end_now('cotrain:result:' .. request)
  put_result(request, result, ttl_ms)
  redis.call('DEL', sample)
  redis.call('HSET', sample, 'state', 'done', 'tenant', tenant, 'digest', digest,
    'failed', failed, 'size', size)
  end_after(sample, ttl_ms + lives.record)

  if clone ~= '' then
    -- The number is the time, or one more than the last number. It therefore increases even after the set expired.
    -- A seq has 64 bits, too many for a Lua number, so it stays text.
    local ended = 'cotrain:completions:' .. sampler .. ':' .. clone
    local now = clock_ms()
    local last = redis.call('ZREVRANGE', ended, 0, 0, 'WITHSCORES')[2]
    local number = math.max(now, last and tonumber(last) + 1 or 0)
    redis.call('ZADD', ended, number, string.match(request, ':(%d+)$'))
    redis.call('ZREMRANGEBYSCORE', ended, '-inf', now - lives.published)
    end_after(ended, lives.published)
  end
  return tenant
end

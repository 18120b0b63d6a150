-- fail_waiting: fail the ops first..last of an ended run, and remove them from its log.
-- needs: ages, spool_refs
-- The requests are added to `resolved`.
local function fail_waiting(prefix, run, tenant, first, last, failure, ttl_ms, resolved)
  local ops, queue = prefix .. 'ops:' .. run, prefix .. 'queue:' .. tenant
  for seq = first, last do
    local envelope = redis.call('HGET', ops, seq)
    if envelope then
      local tokens, size, ref = string.match(envelope, '^[^|]*|(%d+)|(%d+)|[^|]*|(.*)$')
      release_segment(string.match(ref, '^spool:([^:]+):'))
      redis.call('HDEL', ops, seq)
      redis.call('HDEL', prefix .. 'bodies:' .. run, seq)
      redis.call('HINCRBY', queue, 'ops', -1)
      redis.call('HINCRBY', queue, 'tokens', 0 - tonumber(tokens))
      redis.call('HINCRBY', queue, 'bytes', 0 - tonumber(size))
      put_result(run .. ':' .. seq, failure, ttl_ms)
      resolved[#resolved + 1] = run .. ':' .. seq
    end
  end
end

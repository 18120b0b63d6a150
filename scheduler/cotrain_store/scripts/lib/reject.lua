-- reject: fail an op that is accepted and not committed. It keeps its seq.
-- needs: ages, spool_refs
-- `failure` has the result, its ttl_ms, and the new body and envelope of the op. The request is added to `resolved`.
local function reject(prefix, run, tenant, seq, failure, resolved)
  local ops, queue = prefix .. 'ops:' .. run, prefix .. 'queue:' .. tenant
  local envelope = redis.call('HGET', ops, seq)
  local kind, tokens, size, ref = string.match(envelope or '', '^([^|]*)|(%d+)|(%d+)|[^|]*|(.*)$')
  if not kind or kind == 'rejected' then
    return
  end
  release_segment(string.match(ref, '^spool:([^:]+):'))
  redis.call('HINCRBY', queue, 'tokens', 0 - tonumber(tokens))
  redis.call('HINCRBY', queue, 'bytes', #failure.body - tonumber(size))
  redis.call('HSET', ops, seq, failure.envelope)
  redis.call('HSET', prefix .. 'bodies:' .. run, seq, failure.body)
  put_result(run .. ':' .. seq, failure.result, failure.ttl_ms)
  resolved[#resolved + 1] = run .. ':' .. seq
end

-- sample_read: shorten the lifetime of results that clients have received, and stop publishing their completion.
-- needs: ages
local args = cjson.decode(ARGV[1])

for _, request in ipairs(args.requests) do
  local sample, result = 'cotrain:sample:' .. request, 'cotrain:result:' .. request
  if redis.call('EXISTS', result) == 1 then -- the request is done
    end_sooner(result, args.ttl_ms)
    end_sooner(sample, args.ttl_ms + args.record_ms)
    -- Each copy of a client has its own seqs (CLONE_SIZE). A seq has 64 bits, so it stays text.
    local sampler, seq = string.match(request, '^(.*):(%d+)$')
    local clone = #seq > 9 and string.sub(seq, 1, -10) or '0'
    local ended = 'cotrain:completions:' .. sampler .. ':' .. clone
    if redis.call('ZREVRANGE', ended, 0, 0)[1] ~= seq then -- the next number is derived from the last one
      redis.call('ZREM', ended, seq)
    end
  end
end
return 'OK'

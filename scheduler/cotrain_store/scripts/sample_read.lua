-- sample_read: clients have these results: their lives are shortened, and their ends are published no more.
-- needs: ages
local args = cjson.decode(ARGV[1])

for _, request in ipairs(args.requests) do
  local sample, result = 'cotrain:sample:' .. request, 'cotrain:result:' .. request
  if redis.call('EXISTS', result) == 1 then -- so its request is done
    end_sooner(result, args.ttl_ms)
    end_sooner(sample, args.ttl_ms + args.record_ms)
    -- A copy of a client has seqs of its own (CLONE_SIZE). A seq has 64 bits: it stays text.
    local sampler, seq = string.match(request, '^(.*):(%d+)$')
    local clone = #seq > 9 and string.sub(seq, 1, -10) or '0'
    local ended = 'cotrain:completions:' .. sampler .. ':' .. clone
    if redis.call('ZREVRANGE', ended, 0, 0)[1] ~= seq then -- the next number grows from the last one
      redis.call('ZREM', ended, seq)
    end
  end
end
return 'OK'

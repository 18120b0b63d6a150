-- spool_refs: release of the references that ops have to bodies in the spool.
local function release_segment(refs, segment)
  if segment and redis.call('HINCRBY', refs, segment, -1) <= 0 then
    redis.call('HDEL', refs, segment)
  end
end

local function release_body(refs, envelope)
  if string.sub(envelope, 1, 8) ~= 'forward|' then -- a forward's body was released at its commit
    -- Not greedy: the reference is the last of five fields and holds no '|'.
    release_segment(refs, string.match(envelope, '|spool:([^:|]+):[^|]*$'))
  end
end
